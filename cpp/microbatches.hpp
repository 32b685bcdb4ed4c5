// Division of a step's examples into microbatches: longest-processing-time-first on vectors.
#pragma once

#include "common.hpp"

namespace orchmllm {

// share: (n, phases) row-major, each phase scaled to the same total. Examples in descending order
// of their largest share go to the microbatch whose fullest phase stays lowest (then: whose sum of
// phases stays lowest, then the lowest index).
inline void assign_microbatches(View<i64> share, std::size_t phases, std::size_t num_microbatches,
                              i64* step_of) {
  const std::size_t n = phases == 0 ? 0 : share.size / phases;
  std::vector<i64> largest(n), load(num_microbatches * phases);
  for (std::size_t i = 0; i < n; ++i) {
    largest[i] = *std::max_element(share.begin() + i * phases, share.begin() + (i + 1) * phases);
  }
  for (const i32 item : order_descending({largest.data(), n})) {
    const i64* own = share.data + static_cast<std::size_t>(item) * phases;
    std::size_t best = 0;
    i64 best_fullest = std::numeric_limits<i64>::max(), best_sum = best_fullest;
    for (std::size_t step = 0; step < num_microbatches; ++step) {
      i64 fullest = 0, sum = 0;
      for (std::size_t p = 0; p < phases; ++p) {
        const i64 after = load[step * phases + p] + own[p];
        fullest = std::max(fullest, after);
        sum += after;
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
