// Where examples that are shared by the ranks of a node are placed, before all others.
#pragma once

#include "common.hpp"

namespace orchmllm {

// The ranks of each shared example, ascending: count[i] different ones of one node, each of which gets
// share[i]. In the order given, from loads of zero: an example takes the least loaded ranks (ties: the
// lowest) of the node of home[i], if none of them is then above `room`; else those of the node where
// the largest of them is least (ties: that of its home, then the lowest). Every count is at most
// ranks_per_node <= num_ranks.
inline void place_shares(View<i64> share, View<i64> count, View<i64> home, i64 num_ranks,
                         i64 ranks_per_node, i64 room, i64* ranks) {
  using Load = std::pair<i64, i64>;  // (load, rank)
  std::vector<Load> loads;           // node by node, ascending in each
  for (i64 r = 0; r < num_ranks; ++r) loads.emplace_back(0, r);
  const auto first = [&](i64 node) { return loads.begin() + node * ranks_per_node; };
  for (std::size_t i = 0; i < share.size; ++i) {
    // The largest load that a node would have to raise; only the last node may be too small.
    const auto largest = [&](i64 node) {
      return node * ranks_per_node + count[i] > num_ranks ? std::numeric_limits<i64>::max()
                                                          : (first(node) + count[i] - 1)->first;
    };
    i64 best = home[i] / ranks_per_node;
    if (largest(best) > room - share[i]) {
      for (i64 node = 0; node * ranks_per_node < num_ranks; ++node) {
        if (largest(node) < largest(best)) best = node;
      }
    }
    const auto end = first(best) + std::min(ranks_per_node, num_ranks - best * ranks_per_node);
    const auto taken = first(best) + count[i];
    for (auto load = first(best); load < taken; ++load) {
      load->first += share[i];
      *ranks++ = load->second;
    }
    std::sort(ranks - count[i], ranks);
    std::inplace_merge(first(best), taken, end);
  }
}

}  // namespace orchmllm
