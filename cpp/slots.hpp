// Examples packed into the slots of a step, one for each rank of each microbatch.
#pragma once

#include <set>
#include <utility>

#include "common.hpp"

namespace orchmllm {

// cost (n,); size: (n, sizes), cap (sizes,) of a slot. In descending order of cost, each example
// goes to the slot of the least cost that has room for its sizes (ties: the lowest index). False
// where some example finds none, or after a budget of slots looked at.
inline bool fill_slots(View<i64> cost, View<i64> size, View<i64> cap, i64 num_slots,
                       i64* slot_of) {
  constexpr i64 kBudget = i64{1} << 24;
  const std::size_t q = cap.size;
  std::vector<i64> held(static_cast<std::size_t>(num_slots) * q);
  std::set<std::pair<i64, i64>> slots;  // (cost, slot)
  for (i64 slot = 0; slot < num_slots; ++slot) slots.emplace_hint(slots.end(), 0, slot);
  i64 looked = 0;
  for (const i32 item : order_descending(cost)) {
    const auto i = static_cast<std::size_t>(item);
    const i64* own = size.data + i * q;
    auto at = slots.begin();
    const auto has_room = [&](i64 slot) {
      const i64* in = &held[static_cast<std::size_t>(slot) * q];
      for (std::size_t x = 0; x < q; ++x) {
        if (in[x] + own[x] > cap[x]) return false;
      }
      return true;
    };
    while (at != slots.end() && q > 0 && !has_room(at->second)) ++at, ++looked;
    if (at == slots.end() || looked > kBudget) return false;
    auto [load, slot] = *at;
    for (std::size_t x = 0; x < q; ++x) held[static_cast<std::size_t>(slot) * q + x] += own[x];
    slots.erase(at);
    slots.emplace(load + cost[i], slot);
    slot_of[i] = slot;
  }
  return true;
}

}  // namespace orchmllm
