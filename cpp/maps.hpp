// Index maps and sums of a step plan: the loops of orchmllm/plan/ that numpy would do in several
// passes over the global batch.
#pragma once

#include <utility>

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
// with, then to the lowest. The pieces (example, rank, bytes) are in order of their example.
inline void heaviest_holder(View<i64> example, View<i64> rank, View<i64> bytes, i64 num_ranks,
                            std::size_t n, i64* home) {
  std::vector<i64> held(static_cast<std::size_t>(num_ranks));
  std::size_t piece = 0, end = 0;
  for (std::size_t e = 0; e < n; ++e) {
    for (; end < example.size && example[end] == static_cast<i64>(e); ++end) {
      held[static_cast<std::size_t>(rank[end])] += bytes[end];
    }
    const i64 own = home[e];
    i64 most = 0;
    for (; piece < end; ++piece) {
      const i64 candidate = rank[piece];  // counts once: its next piece finds nothing
      const i64 sum = std::exchange(held[static_cast<std::size_t>(candidate)], 0);
      const bool better = sum > most || (sum == most && sum > 0 && home[e] != own &&
                                         (candidate == own || candidate < home[e]));
      if (better) most = sum, home[e] = candidate;
    }
  }
}

// sums (d,) over consecutive runs of values, sizes[r] values each.
inline void sums_of(View<i64> values, View<i64> sizes, i64* sums) {
  const i64* value = values.begin();
  for (std::size_t r = 0; r < sizes.size; value += sizes[r++]) {
    sums[r] = std::accumulate(value, value + sizes[r], i64{0});
  }
}

}  // namespace orchmllm
