// `padded`: every item of a batch pays for the longest in full.
#pragma once

#include "common.hpp"

namespace orchmllm {

// `padded`: least possible max over ranks of (number of items) * (largest weight), OrchMLLM
// Algorithm 2. By exchange, some optimum cuts the sorted list into contiguous runs, and for a given
// bound the longest possible run is known from its first item: binary search over the bound.
// Printed, the upper bound uses the smallest item (must be the largest) and the last probe is
// returned (can be infeasible; here the last feasible one). Items of weight zero stay home.
inline void padded(View<i64> weight, View<i64> home, i64 num_ranks, i64* rank_of) {
  std::vector<i32> order = order_descending(weight);
  for (std::size_t i = 0; i < weight.size; ++i) rank_of[i] = home[i];
  while (!order.empty() && weight[static_cast<std::size_t>(order.back())] == 0) order.pop_back();
  if (order.empty()) return;
  const i64 n = static_cast<i64>(order.size());
  const auto longest_of = [&](i64 first) {
    return weight[static_cast<std::size_t>(order[static_cast<std::size_t>(first)])];
  };
  const auto fits = [&](i64 bound) {
    i64 first = 0;
    for (i64 rank = 0; rank < num_ranks && first < n; ++rank) {
      first += std::min(n - first, bound / longest_of(first));
    }
    return first == n;
  };
  const i64 total = std::accumulate(weight.begin(), weight.end(), i64{0});
  i64 low = std::max(longest_of(0), total / num_ranks + (total % num_ranks != 0));
  const i64 largest_batch = (n + num_ranks - 1) / num_ranks;
  i64 high = longest_of(0) > std::numeric_limits<i64>::max() / largest_batch
                 ? std::numeric_limits<i64>::max()
                 : std::max(low, longest_of(0) * largest_batch);
  if (!fits(high)) {
    throw std::invalid_argument("padded: a batch would cost 2^63 or more; use a larger unit");
  }
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (fits(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  i64 first = 0;
  for (i64 rank = 0; first < n; ++rank) {
    const i64 end = first + std::min(n - first, high / longest_of(first));
    for (; first < end; ++first) {
      rank_of[order[static_cast<std::size_t>(first)]] = rank;
    }
  }
}

}  // namespace orchmllm
