// Division of a step's examples into microbatches that are alike: longest-processing-time-first on
// vectors.
#pragma once

#include "common.hpp"

namespace orchmllm {

constexpr std::size_t kSorted = std::size_t{1} << 15;

// Items of which the `most` heaviest come first, by (-weight, index), then the others as they are.
inline std::vector<i32> heaviest_first(View<i64> weight, std::size_t most) {
  if (weight.size <= most) return order_descending(weight);
  std::vector<i64> values(weight.begin(), weight.end());
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(most),
                   values.end(), std::greater<>());
  const i64 limit = values[most];
  std::vector<i32> first, rest;
  std::vector<i64> kept;
  for (std::size_t i = 0; i < weight.size; ++i) {
    (weight[i] > limit ? first : rest).push_back(static_cast<i32>(i));
    if (weight[i] > limit) kept.push_back(weight[i]);
  }
  std::vector<i32> order;
  order.reserve(weight.size);
  for (const i32 j : order_descending({kept.data(), kept.size()})) {
    order.push_back(first[static_cast<std::size_t>(j)]);
  }
  order.insert(order.end(), rest.begin(), rest.end());
  return order;
}

// share: (n, phases) row-major, each phase scaled to the same total. The heaviest examples in
// descending order of their largest share, then the others, go to the microbatch whose fullest phase
// stays lowest (then: whose sum of phases stays lowest, then the lowest index).
inline void assign_microbatches(View<i64> share, std::size_t phases, std::size_t num_microbatches,
                              i64* step_of) {
  const std::size_t n = share.size / phases;
  std::vector<i64> largest(n), load(num_microbatches * phases);
  for (std::size_t i = 0; i < n; ++i) {
    largest[i] = *std::max_element(share.begin() + i * phases, share.begin() + (i + 1) * phases);
  }
  for (const i32 item : heaviest_first({largest.data(), n}, kSorted)) {
    const i64* own = share.data + static_cast<std::size_t>(item) * phases;
    std::size_t best = 0;
    i64 best_fullest = std::numeric_limits<i64>::max(), best_sum = best_fullest;
    for (std::size_t step = 0; step < num_microbatches; ++step) {
      i64 fullest = 0, sum = 0;
      for (std::size_t p = 0; p < phases; ++p) {
        const i64 after = load[step * phases + p] + own[p];
        fullest = std::max(fullest, after);
        sum += after;
        if (fullest > best_fullest) break;
      }
      if (fullest < best_fullest || (fullest == best_fullest && sum < best_sum)) {
        best = step, best_fullest = fullest, best_sum = sum;
      }
    }
    for (std::size_t p = 0; p < phases; ++p) load[best * phases + p] += own[p];
    step_of[item] = static_cast<i64>(best);
  }
}

}  // namespace orchmllm
