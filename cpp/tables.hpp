// What every example of a batch costs in every phase (orchmllm/plan/cost.py), in one pass over the
// lengths of its segments.
#pragma once

#include <string>

#include "common.hpp"

namespace orchmllm {

// A column of the tables: an encoder phase, whose items are the segments of a modality, or the LLM,
// whose items are whole examples (modality 0). An item of l positions costs
// (constant + linear * l + quadratic * l * min(l, window)) / unit, rounded down; window 0: none.
struct Column {
  i64 modality, constant, linear, quadratic, unit, window;
  i64 longest = 0;

  i64 cost(i64 length) {
    if (length < 0) throw std::invalid_argument("a length is " + std::to_string(length));
    longest = std::max(longest, length);
    const auto l = static_cast<u64>(length);
    const u64 span = window > 0 ? std::min(l, static_cast<u64>(window)) : l;
    return static_cast<i64>((static_cast<u64>(constant) +
                             l * (static_cast<u64>(linear) + static_cast<u64>(quadratic) * span)) /
                            static_cast<u64>(unit));
  }

  // Throws if the cost of the longest item needed more than 63 bits.
  void check() const {
    constexpr i128 kMost = std::numeric_limits<i64>::max();
    const i128 each = linear + static_cast<i128>(quadratic) * longest;
    if (each <= kMost && constant + each * longest <= kMost) return;
    throw std::invalid_argument("a length is " + std::to_string(longest) +
                                ": its cost overflows int64");
  }
};

// cost, most, positions (n, columns): of each example, of its most expensive item, and its
// positions. Segments (s,) are in the order of their examples, segments_of (n,) each.
inline void example_tables(View<i64> modality, View<i64> length, View<i64> tokens,
                           View<i64> segments_of, std::vector<Column>& columns, i64* cost,
                           i64* most, i64* positions) {
  const std::size_t p = columns.size();
  std::size_t segment = 0;
  for (const i64 count : segments_of) {
    std::fill_n(cost, p, 0), std::fill_n(most, p, 0), std::fill_n(positions, p, 0);
    i64 all = 0;
    for (const std::size_t end = segment + static_cast<std::size_t>(count); segment < end;
         ++segment) {
      all += tokens[segment];
      const i64 code = modality[segment];
      if (code == 0) continue;
      for (std::size_t c = 0; c < p; ++c) {
        if (columns[c].modality != code) continue;
        const i64 one = columns[c].cost(length[segment]);
        cost[c] += one, positions[c] += length[segment];
        most[c] = std::max(most[c], one);
      }
    }
    for (std::size_t c = 0; c < p; ++c) {
      if (columns[c].modality == 0) cost[c] = most[c] = columns[c].cost(all), positions[c] = all;
    }
    cost += p, most += p, positions += p;
  }
  for (const Column& column : columns) column.check();
}

}  // namespace orchmllm
