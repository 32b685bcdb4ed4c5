// Lower bounds of the largest load. Each `allows(T)` is a condition that every assignment with all
// loads <= T meets; the bound is the first T that meets them all. Proofs are in docs/balancing.md.
#pragma once

#include "common.hpp"

namespace orchmllm {

__extension__ typedef __int128 i128;  // T * num_ranks passes 2^63 when one item is a giant

// The largest step up to 64 that at least 15 of 16 sampled weights are multiples of: areas of
// images are multiples of a row of patches. Most loads can only be multiples of it. Items of weight
// zero say nothing.
inline i64 common_step(View<i64> weight) {
  constexpr i64 kSamples = 1024;
  const i64 positive =
      std::count_if(weight.begin(), weight.end(), [](i64 w) { return w > 0; });
  const i64 stride = std::max<i64>(1, positive / kSamples);
  std::vector<i64> sample;
  i64 skip = 0;
  for (const i64 w : weight) {
    if (w == 0 || skip-- > 0) continue;
    sample.push_back(w);
    skip = stride - 1;
  }
  for (i64 step = 64; step > 1; --step) {
    std::size_t others = 0;
    for (std::size_t i = 0; i < sample.size() && 16 * others <= sample.size(); ++i) {
      others += sample[i] % step != 0;
    }
    if (16 * others <= sample.size()) return step;
  }
  return 1;
}

// A load T - w of a rank wastes w; with weights that are nearly all multiples of a step, few ranks
// can have a load that is not, so that most waste T modulo the step.
class StepBound {
 public:
  StepBound(View<i64> weight, i64 sum, i64 num_ranks)
      : sum_(sum), num_ranks_(num_ranks), step_(common_step(weight)), count_(index(step_)) {
    if (step_ == 1) return;
    for (const i64 w : weight) ++count_[index(w % step_)];
  }

  bool allows(i64 limit) const {
    for (i64 step = step_; step > 1; step % 2 == 0 ? step /= 2 : step = 1) {
      const i64 over = limit % step;
      const i128 spare = static_cast<i128>(limit - over) * num_ranks_ - sum_;
      if (over > 0 && spare < 0 && spare + gain(step, over) < 0) return false;
    }
    return true;
  }

 private:
  static std::size_t index(i64 i) { return static_cast<std::size_t>(i); }

  // The most by which the remainders modulo `step` lower the waste of all ranks below `over` each.
  // A group of items gains at most `over`, and nothing if it is one item with a larger remainder;
  // items with a small remainder gain it on their own.
  i128 gain(i64 step, i64 over) const {
    std::vector<i64> small(index(over) + 1);
    i64 large = 0;
    i128 best = 0;
    for (i64 r = 1; r < step_; ++r) {
      const i64 left = r % step;
      if (left == 0) continue;
      if (left > over) {
        large += count_[index(r)];
      } else {
        small[index(left)] += count_[index(r)];
        best += static_cast<i128>(left) * count_[index(r)];
      }
    }
    best += static_cast<i128>(large / 2) * over;
    i128 paired = best;  // as many pairs of a large and the smallest small one as pay off
    i64 r = 1;
    const auto next = [&] {
      while (r <= over && small[index(r)] == 0) ++r;
      if (r > over) return false;
      --small[index(r)];
      return true;
    };
    while (large > 0 && next()) {
      paired += over - r - (large % 2 == 0 ? over : 0);
      --large;
      if (paired + over < best) break;
      best = std::max(best, paired);
    }
    return best;
  }

  i64 sum_, num_ranks_, step_;
  std::vector<i64> count_;  // by remainder
};

// A rank with an item so heavy that only one other item fits wastes what that one leaves.
class HeavyBound {
 public:
  HeavyBound(View<i64> weight, i64 sum, i64 num_ranks, i64 limit)
      : sum_(sum), num_ranks_(num_ranks) {
    for (const i64 w : weight) {
      if (w > 0) lightest_ = std::min(lightest_, w);
    }
    if (lightest_ > limit / 4 || lightest_ > kLightest) return;
    for (const i64 w : weight) {
      if (w > limit - 2 * lightest_) heavy_.push_back(w);
    }
    if (heavy_.empty()) return;
    std::sort(heavy_.begin(), heavy_.end(), std::greater<>());
    count_.resize(static_cast<std::size_t>(lightest_));
    for (const i64 w : weight) {
      if (w > 0 && w < 2 * lightest_) ++count_[static_cast<std::size_t>(w - lightest_)];
    }
  }

  bool allows(i64 limit) const {
    std::vector<i64> left = count_;  // of each weight from lightest_ on
    i128 waste = 0;
    for (const i64 w : heavy_) {  // the least room first: it takes the heaviest item that fits
      if (w <= limit - 2 * lightest_) break;
      i64 room = limit - w;
      i64 filler = room;
      while (filler >= lightest_ && left[static_cast<std::size_t>(filler - lightest_)] == 0) {
        --filler;
      }
      if (filler >= lightest_) {
        --left[static_cast<std::size_t>(filler - lightest_)];
        room -= filler;
      }
      waste += room;
    }
    return sum_ + waste <= static_cast<i128>(limit) * num_ranks_;
  }

 private:
  static constexpr i64 kLightest = 4096;  // beyond it single units do not matter
  i64 sum_, num_ranks_, lightest_ = std::numeric_limits<i64>::max() / 8;
  std::vector<i64> heavy_, count_;
};

// The least possible maximum load, from below: max(mean, longest item), rounded up to a multiple of
// the greatest common divisor of the weights and on to the first value that the bounds above allow.
inline i64 lower_bound_load(View<i64> weight, i64 num_ranks) {
  i64 sum = 0, longest = 0, divisor = 0;
  for (const i64 w : weight) {
    sum += w;
    longest = std::max(longest, w);
    if (divisor != 1) divisor = std::gcd(divisor, w);
  }
  if (divisor == 0) return 0;
  const i64 units = sum / divisor;
  i64 limit = (units / num_ranks + (units % num_ranks != 0)) * divisor;
  limit = std::max(limit, longest);
  const StepBound steps(weight, sum, num_ranks);
  const HeavyBound heavy(weight, sum, num_ranks, limit);
  constexpr int kTries = 256;
  for (int k = 0; k < kTries && !(steps.allows(limit) && heavy.allows(limit)); ++k) {
    limit += divisor;
  }
  return limit;
}

}  // namespace orchmllm
