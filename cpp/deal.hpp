// Dealing the items of two ranks anew, by an exact subset sum: dearer than a trade of a few items,
// but with tens of items nearly every sum can be reached.
#pragma once

#include "pick.hpp"

namespace orchmllm {

class Deal {
 public:
  explicit Deal(i64 unit) : unit_(unit) {}

  // Marks items of `pool` with a sum inside the window: of the first items that have one, the least
  // such sum, and those at their end only where they are needed. All weights are multiples of the
  // unit. False if no sum is inside, or if sums are too many to list.
  bool find(const List& pool, Window window, Budget& budget, std::vector<char>& chosen) {
    constexpr i64 kSums = i64{1} << 16;
    if (window.low < 0 || window.high / unit_ >= kSums) return false;
    const std::size_t low = static_cast<std::size_t>((window.low + unit_ - 1) / unit_);
    const std::size_t high = static_cast<std::size_t>(window.high / unit_);
    const std::size_t words = high / 64 + 1;
    if (!budget.spend(pool.size() * words / 4)) return false;  // four words at a time
    if (sums_.size() < (pool.size() + 1) * words) sums_.resize((pool.size() + 1) * words);
    std::fill_n(sums_.begin(), words, 0);  // every later row is written as a whole
    sums_[0] = 1;
    std::size_t count = 0, sum = least(0, words, low, high);
    while (sum > high && count < pool.size()) {
      add(count, words, pool[count].weight / unit_);
      sum = least(++count, words, low, high);
    }
    if (sum > high) return false;
    chosen.assign(pool.size(), 0);
    while (count-- > 0) {
      if (reached(count, words, sum)) continue;
      chosen[count] = 1;
      sum -= static_cast<std::size_t>(pool[count].weight / unit_);
    }
    return true;
  }

 private:
  bool reached(std::size_t row, std::size_t words, std::size_t sum) const {
    return sums_[row * words + sum / 64] >> (sum % 64) & 1;
  }

  // The least sum in [low, high] that a row reaches; high + 1 if none.
  std::size_t least(std::size_t row, std::size_t words, std::size_t low, std::size_t high) const {
    const u64* sums = sums_.data() + row * words;
    for (std::size_t i = low / 64; i < words; ++i) {
      u64 bits = sums[i];
      if (i == low / 64) bits &= ~u64{0} << (low % 64);
      if (bits == 0) continue;
      std::size_t sum = 64 * i;
      while ((bits & 1) == 0) bits >>= 1, ++sum;
      return std::min(sum, high + 1);
    }
    return high + 1;
  }

  // Row k + 1: the sums of row k, with and without an item of this weight.
  void add(std::size_t k, std::size_t words, i64 weight) {
    const u64* from = sums_.data() + k * words;
    u64* to = sums_.data() + (k + 1) * words;
    const std::size_t skip = std::min(words, static_cast<std::size_t>(weight) / 64);
    const unsigned shift = static_cast<unsigned>(weight % 64);
    std::copy(from, from + words, to);
    for (std::size_t i = skip; i < words; ++i) to[i] |= from[i - skip] << shift;
    if (shift == 0) return;
    for (std::size_t i = skip + 1; i < words; ++i) to[i] |= from[i - skip - 1] >> (64 - shift);
  }

  i64 unit_;
  std::vector<u64> sums_;  // a bit for each sum up to the window's end, after each item
};

}  // namespace orchmllm
