// Which rank processes which batch, when the batches are given: next to where its items are.
#pragma once

#include <cstdlib>

#include "common.hpp"

namespace orchmllm {

// Volume of batch `batch` that lies on `place` (a rank or a node).
struct Share {
  i64 volume, batch, place;
};

// The shares of all (batch, place) pairs that have any, by (batch, place).
inline std::vector<Share> shares_of(View<i64> place, View<i64> batch, View<i64> volume) {
  const i64 places = 1 + (place.size > 0 ? *std::max_element(place.begin(), place.end()) : 0);
  std::vector<i64> pair(place.size);
  for (std::size_t i = 0; i < place.size; ++i) pair[i] = batch[i] * places + place[i];
  std::vector<Share> shares;
  i64 before = -1;
  for (const i32 item : order_ascending({pair.data(), pair.size()})) {
    const std::size_t i = at(item);
    if (pair[i] == before) {
      shares.back().volume += volume[i];
    } else {
      shares.push_back({volume[i], batch[i], place[i]});
    }
    before = pair[i];
  }
  return shares;
}

// The same, the largest first.
inline std::vector<Share> largest_shares(View<i64> place, View<i64> batch, View<i64> volume) {
  const std::vector<Share> shares = shares_of(place, batch, volume);
  std::vector<i64> held;
  for (const Share& share : shares) held.push_back(share.volume);
  std::vector<Share> sorted;
  for (const i32 i : order_descending({held.data(), held.size()})) {
    sorted.push_back(shares[static_cast<std::size_t>(i)]);
  }
  return sorted;
}

// rank_of_batch (num_ranks) for given nodes: each batch, the largest share first, next to the rank of
// its node that holds most of it.
inline std::vector<i64> ranks_inside(View<i64> source, View<i64> batch, View<i64> volume,
                                     i64 num_ranks, i64 ranks_per_node,
                                     const std::vector<i64>& node_of) {
  const i64 num_nodes = (num_ranks + ranks_per_node - 1) / ranks_per_node;
  std::vector<i64> rank_of(at(num_ranks), -1);
  std::vector<char> taken(at(num_ranks));
  for (const Share& s : largest_shares(source, batch, volume)) {
    if (s.place / ranks_per_node == node_of[at(s.batch)] && rank_of[at(s.batch)] < 0 &&
        !taken[at(s.place)]) {
      rank_of[at(s.batch)] = s.place;
      taken[at(s.place)] = 1;
    }
  }
  std::vector<i64> first(at(num_nodes));
  for (i64 k = 0; k < num_nodes; ++k) first[at(k)] = k * ranks_per_node;
  for (i64 b = 0; b < num_ranks; ++b) {
    if (rank_of[at(b)] >= 0) continue;
    i64& rank = first[at(node_of[at(b)])];
    while (taken[at(rank)]) ++rank;
    taken[at(rank)] = 1;
    rank_of[at(b)] = rank;
  }
  return rank_of;
}

// rank_of_batch (num_ranks): a permutation. Batches go, the largest share first, to the node that
// holds most of them while it has free ranks, and inside the node to the rank that does.
inline std::vector<i64> near_home(View<i64> source, View<i64> batch, View<i64> volume,
                                  i64 num_ranks, i64 ranks_per_node) {
  const i64 num_nodes = (num_ranks + ranks_per_node - 1) / ranks_per_node;
  std::vector<i64> node(source.size), free(at(num_nodes)), node_of(at(num_ranks), -1);
  for (std::size_t i = 0; i < source.size; ++i) node[i] = source[i] / ranks_per_node;
  for (i64 r = 0; r < num_ranks; ++r) ++free[at(r / ranks_per_node)];
  for (const Share& s : largest_shares({node.data(), node.size()}, batch, volume)) {
    if (node_of[at(s.batch)] < 0 && free[at(s.place)] > 0) {
      node_of[at(s.batch)] = s.place;
      --free[at(s.place)];
    }
  }
  i64 next = 0;
  for (i64& k : node_of) {
    if (k >= 0) continue;
    while (free[at(next)] == 0) ++next;
    k = next;
    --free[at(next)];
  }
  return ranks_inside(source, batch, volume, num_ranks, ranks_per_node, node_of);
}

// A plan whose items exchange places, so that more of them are on the node of their home. In each
// node the items of its ranks and those that `plan` puts there meet, the heaviest first: one takes
// the place of one of nearly its weight. What is left fills the places that are left, by weight.
// ascending: the items by weight.
inline std::vector<i64> nearer_home(const std::vector<i64>& plan, View<i64> weight, View<i64> home,
                                    const std::vector<i32>& ascending, i64 num_ranks,
                                    i64 ranks_per_node) {
  const std::size_t num_nodes = at((num_ranks - 1) / ranks_per_node + 1);
  std::vector<std::vector<std::size_t>> own(num_nodes), held(num_nodes);
  for (auto i = ascending.rbegin(); i != ascending.rend(); ++i) {
    own[at(home[at(*i)] / ranks_per_node)].push_back(at(*i));
    held[at(plan[at(*i)] / ranks_per_node)].push_back(at(*i));
  }
  std::vector<i64> rank_of(plan.size(), -1);
  std::vector<char> taken(plan.size());
  for (std::size_t k = 0; k < num_nodes; ++k) {
    for (std::size_t i = 0, j = 0; i < own[k].size() && j < held[k].size();) {
      const std::size_t item = own[k][i], place = held[k][j];
      const i64 above = weight[item] - weight[place], near = weight[place] / 8;
      if (std::abs(above) <= near) {
        rank_of[item] = plan[place];
        taken[place] = 1;
      }
      i += above >= -near;
      j += above <= near;
    }
  }
  auto place = ascending.begin();
  for (const i32 item : ascending) {
    if (rank_of[at(item)] >= 0) continue;
    while (taken[at(*place)]) ++place;
    rank_of[at(item)] = plan[at(*place++)];
  }
  return rank_of;
}

}  // namespace orchmllm
