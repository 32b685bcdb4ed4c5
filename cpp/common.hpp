// What every policy shares: types and stable sorting.
// Everything here is exact integer arithmetic: plans are compared between ranks by digest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace orchmllm {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
__extension__ typedef __int128 i128;  // cap * num_ranks passes 2^63 when one item is a giant

// A read-only view of a caller's array (std::span is C++20).
template <class T>
struct View {
  const T* data = nullptr;
  std::size_t size = 0;
  const T& operator[](std::size_t i) const { return data[i]; }
  const T* begin() const { return data; }
  const T* end() const { return data + size; }
};

inline std::size_t at(i64 index) { return static_cast<std::size_t>(index); }

inline i64 total(View<i64> values) {
  return std::accumulate(values.begin(), values.end(), i64{0});
}

// Item indices sorted by (weight, index): a least-significant-digit radix sort on packed keys. It is
// stable and several times cheaper than std::sort at 150,000 items; weights of more than 31 bits
// (costs in kFLOP) are sorted by their leading digits first and finished by a stable sort of ties.
inline std::vector<i32> order_ascending(View<i64> weight) {
  const std::size_t n = weight.size;
  std::vector<u64> keys(n), scratch(n);
  u64 low = ~u64{0}, high = 0;
  for (const i64 w : weight) {
    low = std::min(low, static_cast<u64>(w));
    high = std::max(high, static_cast<u64>(w));
  }
  int drop = 0;  // low bits that do not fit beside a 32-bit index
  while (n > 0 && ((high - low) >> drop) > 0xffffffffu) ++drop;
  for (std::size_t i = 0; i < n; ++i) {
    keys[i] = ((static_cast<u64>(weight[i]) - low) >> drop) << 32 | i;
  }
  constexpr int kBits = 11;
  constexpr std::size_t kBuckets = std::size_t{1} << kBits;
  std::vector<std::size_t> start(kBuckets + 1);
  for (int shift = 32; n > 0 && (((high - low) >> drop) >> (shift - 32)) != 0; shift += kBits) {
    std::fill(start.begin(), start.end(), 0);
    for (const u64 key : keys) ++start[((key >> shift) & (kBuckets - 1)) + 1];
    std::partial_sum(start.begin(), start.end(), start.begin());
    for (const u64 key : keys) scratch[start[(key >> shift) & (kBuckets - 1)]++] = key;
    keys.swap(scratch);
    if (shift + kBits >= 64) break;
  }
  std::vector<i32> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = static_cast<i32>(keys[i] & 0xffffffffu);
  if (drop > 0) {
    const auto lighter = [&](i32 a, i32 b) {
      return weight[static_cast<std::size_t>(a)] < weight[static_cast<std::size_t>(b)];
    };
    for (std::size_t i = 0, j = 0; i < n; i = j) {
      while (j < n && keys[j] >> 32 == keys[i] >> 32) ++j;
      const auto first = order.begin() + static_cast<std::ptrdiff_t>(i);
      const auto last = order.begin() + static_cast<std::ptrdiff_t>(j);
      if (!std::is_sorted(first, last, lighter)) std::stable_sort(first, last, lighter);
    }
  }
  return order;
}

// Item indices by (-weight, index).
inline std::vector<i32> order_descending(View<i64> weight) {
  std::vector<i32> order = order_ascending(weight);
  std::reverse(order.begin(), order.end());
  for (std::size_t i = 0, j = 0; i < order.size(); i = j) {  // ties back to ascending index
    const auto value = [&](std::size_t k) { return weight[static_cast<std::size_t>(order[k])]; };
    while (j < order.size() && value(j) == value(i)) ++j;
    std::reverse(order.begin() + static_cast<std::ptrdiff_t>(i),
                 order.begin() + static_cast<std::ptrdiff_t>(j));
  }
  return order;
}

}  // namespace orchmllm
