// `conv_transformer`: max over ranks of sum(weight) + (number of items) * (largest pad), OrchMLLM Algorithm 5:
// packed projections, padded attention. `pad` must grow with `weight`. Binary search over the bound;
// for one bound a batch opens with the heaviest item that is left and takes the heaviest item that
// still fits until none does. Printed, b is undefined, the test for a quadratic cost is linear and
// d + 1 batches can come out.
#pragma once

#include "common.hpp"

namespace orchmllm {

class Conv {
 public:
  Conv(View<i64> weight, View<i64> pad, i64 num_ranks)
      : weight_(weight), pad_(pad), num_ranks_(num_ranks), order_(order_descending(weight)) {
    while (!order_.empty() && at(order_.size() - 1) == 0) order_.pop_back();
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (i == 0 || at(i) != at(i - 1)) value_.push_back(at(i)), first_.push_back(i);
    }
    first_.push_back(order_.size());
  }

  void run(View<i64> home, i64* rank_of) {
    for (std::size_t i = 0; i < weight_.size; ++i) rank_of[i] = home[i];
    if (order_.empty()) return;
    i64 sum = 0;
    for (const i32 item : order_) {
      sum += weight_[static_cast<std::size_t>(item)] + pad_[static_cast<std::size_t>(item)];
    }
    const i64 mean = sum / num_ranks_ + (sum % num_ranks_ != 0);
    i64 low = std::max(mean, value_[0] + pad_[static_cast<std::size_t>(order_[0])]);
    // Optima lie a few tenths of a percent above the bound, so search near it first.
    i64 step = std::max<i64>(1, low / 64), high = low + step;
    constexpr i64 kLargest = i64{1} << 61;
    while (!fill(high, nullptr)) {
      if (high >= kLargest) {
        throw std::invalid_argument("padded_cost: a batch would cost 2^61 or more; use a larger unit");
      }
      low = high + 1;
      step *= 2;
      high = std::min(low + step, kLargest);
    }
    while (low < high && high - low > high / kFine) {
      const i64 middle = low + (high - low) / 2;
      if (fill(middle, nullptr)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    fill(high, rank_of);
  }

 private:
  static constexpr i64 kFine = 1 << 20;

  i64 at(std::size_t k) const { return weight_[static_cast<std::size_t>(order_[k])]; }

  // The first value >= k (in descending order of weight) of which an item is left.
  std::size_t alive(std::size_t k) {
    while (next_[k] != k) {
      next_[k] = next_[next_[k]];
      k = next_[k];
    }
    return k;
  }

  // Fills num_ranks batches up to `bound`; true if no item is left over.
  bool fill(i64 bound, i64* rank_of) {
    const std::size_t values = value_.size();
    used_ = first_;
    next_.resize(values + 1);
    std::iota(next_.begin(), next_.end(), std::size_t{0});
    for (i64 rank = 0; rank < num_ranks_; ++rank) {
      std::size_t k = alive(0);
      if (k == values) return true;
      const i64 pad = pad_[static_cast<std::size_t>(order_[used_[k]])];
      i64 room = bound;
      while (k < values && room - pad >= value_[k]) {
        room -= value_[k] + pad;
        if (rank_of != nullptr) rank_of[order_[used_[k]]] = rank;
        if (++used_[k] == first_[k + 1]) next_[k] = k + 1;
        k = alive(k);
        if (k < values && value_[k] > room - pad) {
          k = static_cast<std::size_t>(
              std::lower_bound(value_.begin() + static_cast<std::ptrdiff_t>(k), value_.end(),
                               room - pad, std::greater<i64>()) -
              value_.begin());
          k = alive(k);
        }
      }
    }
    return alive(0) == values;
  }

  View<i64> weight_, pad_;
  i64 num_ranks_;
  std::vector<i32> order_;             // items of positive weight, heaviest first
  std::vector<i64> value_;             // distinct weights, descending
  std::vector<std::size_t> first_, used_, next_;  // of each value: where it starts in order_, ...
};

}  // namespace orchmllm
