// A lower bound of the largest load.
#pragma once

#include "common.hpp"

namespace orchmllm {

// max(mean, most that a rank holds, longest item on the rank that holds least), rounded up to a
// multiple of the greatest common divisor of the weights and of what is held.
// held: (num_ranks) what each rank has before any item comes, or empty.
inline i64 lower_bound_load(View<i64> weight, i64 num_ranks, View<i64> held) {
  i64 sum = 0, divisor = 0;
  const auto longest = [&](View<i64> loads) {
    i64 most = 0;
    for (const i64 w : loads) {
      sum += w;
      most = std::max(most, w);
      if (divisor != 1) divisor = std::gcd(divisor, w);
    }
    return most;
  };
  const i64 least = held.size > 0 ? *std::min_element(held.begin(), held.end()) : 0;
  const i64 single = std::max(least + longest(weight), longest(held));
  if (divisor == 0) return 0;
  const i64 units = sum / divisor;
  return std::max(single, (units / num_ranks + (units % num_ranks != 0)) * divisor);
}

// Of the q * num_ranks + 1 heaviest items some rank gets q + 1: no largest load is below the sum of
// the q + 1 lightest of these. order: ascending by weight.
inline i64 crowding_bound(View<i64> weight, const std::vector<i32>& order, i64 num_ranks) {
  i64 bound = 0;
  const i64 n = static_cast<i64>(order.size());
  for (i64 q = 1; q * num_ranks < n; ++q) {
    i64 sum = 0;
    for (i64 k = n - q * num_ranks - 1; k < n - q * num_ranks + q; ++k) {
      sum += weight[static_cast<std::size_t>(order[static_cast<std::size_t>(k)])];
    }
    bound = std::max(bound, sum);
  }
  return bound;
}

}  // namespace orchmllm
