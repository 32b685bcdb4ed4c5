// A lower bound of the largest load.
#pragma once

#include "common.hpp"

namespace orchmllm {

// max(mean, most that a rank holds, longest item on the rank that holds least), raised until the
// ranks have room for all items in multiples of the greatest common divisor of the weights.
// held: (num_ranks) what each rank has before any item comes, or empty.
inline i64 lower_bound_load(View<i64> weight, i64 num_ranks, View<i64> held) {
  i64 sum = 0, longest = 0, divisor = 0;
  for (const i64 w : weight) {
    sum += w;
    longest = std::max(longest, w);
    if (divisor != 1) divisor = std::gcd(divisor, w);
  }
  divisor = std::max<i64>(1, divisor);
  const i64 units = sum / divisor;
  const auto mean = [&](i64 all) { return all / num_ranks + (all % num_ranks != 0); };
  if (held.size == 0) return std::max(longest, mean(units) * divisor);
  const auto [least, most] = std::minmax_element(held.begin(), held.end());
  i64 low = std::max({*most, *least + longest, mean(sum + total(held))}), high = low + divisor;
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    i128 room = 0;
    for (const i64 load : held) room += (middle - load) / divisor;
    (room >= units ? high : low) = middle + (room < units);
  }
  return low;
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
