// Index maps of a step plan: the loops of orchmllm/plan/rearrange.py and step.py that numpy would
// do in several passes over the global batch.
#pragma once

#include "common.hpp"

namespace orchmllm {

// Stable counting sort: order (n,) lists the items of rank 0, then 1, ...; sizes (num_ranks,).
inline void group_by_rank(View<i64> rank_of, i64 num_ranks, i64* order, i64* sizes) {
  std::vector<i64> next(static_cast<std::size_t>(num_ranks) + 1);
  for (const i64 rank : rank_of) ++next[static_cast<std::size_t>(rank) + 1];
  for (i64 r = 0; r < num_ranks; ++r) sizes[r] = next[static_cast<std::size_t>(r) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (std::size_t i = 0; i < rank_of.size; ++i) {
    order[next[static_cast<std::size_t>(rank_of[i])]++] = static_cast<i64>(i);
  }
}

// The same order for items made of counts[i] sub-items each: out (sum of counts,).
inline void expand_order(View<i64> order, View<i64> counts, i64* out) {
  std::vector<i64> start(counts.size + 1);
  std::partial_sum(counts.begin(), counts.end(), start.begin() + 1);
  for (const i64 item : order) {
    const i64 end = start[static_cast<std::size_t>(item) + 1];
    for (i64 k = start[static_cast<std::size_t>(item)]; k < end; ++k) *out++ = k;
  }
}

// home (n,): the rank that holds most bytes of each example; ties go to its own rank `home` comes
// with, then to the lowest. The pieces (example, rank, bytes) may come in any order.
inline void heaviest_holder(View<i64> example, View<i64> rank, View<i64> bytes, std::size_t n,
                            i64* home) {
  std::vector<i64> first(n + 1), piece(example.size);
  for (const i64 e : example) ++first[static_cast<std::size_t>(e) + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<i64> next(first.begin(), first.end());
  for (std::size_t k = 0; k < example.size; ++k) {
    piece[static_cast<std::size_t>(next[static_cast<std::size_t>(example[k])]++)] =
        static_cast<i64>(k);
  }
  for (std::size_t e = 0; e < n; ++e) {
    const auto begin = piece.begin() + first[e], end = piece.begin() + first[e + 1];
    const i64 own = home[e];
    i64 most = 0;
    for (auto a = begin; a != end; ++a) {
      const i64 candidate = rank[static_cast<std::size_t>(*a)];
      i64 held = 0;
      for (auto b = begin; b != end; ++b) {
        if (rank[static_cast<std::size_t>(*b)] == candidate) held += bytes[static_cast<std::size_t>(*b)];
      }
      const bool better = held > most || (held == most && held > 0 && home[e] != own &&
                                          (candidate == own || candidate < home[e]));
      if (better) most = held, home[e] = candidate;
    }
  }
}

}  // namespace orchmllm
