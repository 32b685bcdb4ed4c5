// A lower bound of the largest load.
#pragma once

#include "common.hpp"

namespace orchmllm {

// max(mean, longest item), rounded up to a multiple of the greatest common divisor of the weights.
inline i64 lower_bound_load(View<i64> weight, i64 num_ranks) {
  i64 sum = 0, longest = 0, divisor = 0;
  for (const i64 w : weight) {
    sum += w;
    longest = std::max(longest, w);
    if (divisor != 1) divisor = std::gcd(divisor, w);
  }
  if (divisor == 0) return 0;
  const i64 units = sum / divisor;
  return std::max(longest, (units / num_ranks + (units % num_ranks != 0)) * divisor);
}

}  // namespace orchmllm
