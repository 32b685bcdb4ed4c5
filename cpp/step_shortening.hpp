// Microbatches that wait for less than those that are alike.
#pragma once

#include <cmath>

#include "microbatches.hpp"

namespace orchmllm {

// A step whose microbatches are not alike but shorter. All ranks meet in every microbatch, which
// takes at least max(sum / num_ranks, longest item) in each phase.
//
// Objective: the sum of that over microbatches and phases. Invariants: it never rises; no
// microbatch gets more of a size than its room, except what it had; none falls below `least`
// examples.
//
// n examples in num_microbatches, micro_of (n,): the plan to start from. cost, longest: (n, phases)
// of each example, and of its most expensive item; size: (n, sizes), room: (sizes,) of a
// microbatch. The move of one example that shortens the step the most is made until none does, the
// rest is below 0.1% of the step, or the budget of operations is spent: long examples gather where
// others of their length are, short ones fill up what waits for these. Of many examples the longest
// ones move, and a sample of the others.
class StepShortening {
 public:
  StepShortening(std::size_t n, View<i64> cost, View<i64> longest, View<i64> size, View<i64> room,
                 i64 num_ranks, std::size_t num_microbatches, i64 least, i64* micro_of)
      : p_(n == 0 ? 0 : cost.size / n), q_(room.size), n_(n), k_(num_microbatches), d_(num_ranks),
        least_(std::max(least, i64{1})), size_(size), room_(room), cost_(n * p_), roof_(n * p_),
        fixed_(2 * k_ * p_), movable_(n), micro_of_(micro_of) {
    scale(cost, longest);
    std::iota(movable_.begin(), movable_.end(), 0);
    count();
  }

  // Makes the moves; how long the step then takes at least.
  double run() {
    if (!waits()) return time();
    if (n_ > kMovable) choose_movable();
    const auto round = static_cast<i64>(movable_.size() * k_ * std::max(p_, std::size_t{1}));
    for (i64 spent = 0; spent < kBudget && best_move() && waits(); spent += round) {}
    return time();
  }

  // Another plan to start from: the examples in descending order of their longest item, cut into
  // microbatches such that the step is as short as it gets, by dynamic programming over kCuts
  // places. Leaves the plan as it is where nothing waits, or no cut keeps the room and `least`. No
  // move of one example shortens a step where each microbatch has several that are equally long.
  void cut_in_order() {
    if (!waits()) return;
    const std::vector<i32> order = longest_first(n_);
    const std::size_t cuts = std::min(kCuts, n_), row = cuts + 1;
    const auto place = [&](std::size_t c) { return c * n_ / cuts; };
    const std::vector<i64> time = times_between(order, cuts);
    std::vector<i64> best((k_ + 1) * row, kNever);
    std::vector<std::size_t> from(best.size());
    best[0] = 0;
    for (std::size_t k = 1; k <= k_; ++k) {
      for (std::size_t a = 0; a < cuts; ++a) {
        const i64 before = best[(k - 1) * row + a];
        if (before == kNever) continue;
        for (std::size_t b = a + 1; b <= cuts; ++b) {
          const i64 own = time[a * row + b];
          if (own == kNever || before + own >= best[k * row + b]) continue;
          best[k * row + b] = before + own, from[k * row + b] = a;
        }
      }
    }
    if (best.back() == kNever) return;
    for (std::size_t k = k_, b = cuts; k > 0; --k) {
      const std::size_t a = from[k * row + b];
      for (std::size_t j = place(a); j < place(b); ++j) {
        micro_of_[order[j]] = static_cast<i64>(k - 1);
      }
      b = a;
    }
    count();
  }

 private:
  static constexpr i64 kBudget = i64{1} << 26;
  static constexpr std::size_t kMovable = 4096;
  static constexpr std::size_t kCuts = 256;
  static constexpr i64 kNever = std::numeric_limits<i64>::max();

  double time() const {
    return std::ldexp(static_cast<double>(now_), drop_) / static_cast<double>(d_);
  }

  void count() {
    sum_.assign(k_ * p_, 0), held_.assign(k_ * q_, 0), count_.assign(k_, 0);
    for (std::size_t i = 0; i < n_; ++i) {
      const auto k = static_cast<std::size_t>(micro_of_[i]);
      ++count_[k];
      for (std::size_t p = 0; p < p_; ++p) sum_[k * p_ + p] += cost_[i * p_ + p];
      for (std::size_t q = 0; q < q_; ++q) held_[k * q_ + q] += size_[i * q_ + q];
    }
  }

  // Examples in descending order of their longest item, the first `most` of them sorted.
  std::vector<i32> longest_first(std::size_t most) const {
    std::vector<i64> longest(n_);
    for (std::size_t x = 0; x < n_ * p_; ++x) {
      longest[x / p_] = std::max(longest[x / p_], roof_[x]);
    }
    return heaviest_first({longest.data(), n_}, most);
  }

  // (cuts + 1, cuts + 1): how long a microbatch takes of the examples from one place of the order
  // to another, kNever where they are too many or too few.
  std::vector<i64> times_between(const std::vector<i32>& order, std::size_t cuts) const {
    std::vector<i64> sums(cuts * p_), roofs(cuts * p_), sizes(cuts * q_);
    for (std::size_t c = 0, j = 0; c < cuts; ++c) {
      for (; j < (c + 1) * n_ / cuts; ++j) {
        const auto i = static_cast<std::size_t>(order[j]);
        for (std::size_t p = 0; p < p_; ++p) {
          sums[c * p_ + p] += cost_[i * p_ + p];
          roofs[c * p_ + p] = std::max(roofs[c * p_ + p], roof_[i * p_ + p]);
        }
        for (std::size_t q = 0; q < q_; ++q) sizes[c * q_ + q] += size_[i * q_ + q];
      }
    }
    std::vector<i64> time((cuts + 1) * (cuts + 1), kNever);
    for (std::size_t a = 0; a < cuts; ++a) {
      std::vector<i64> sum(p_), roof(p_), held(q_);
      for (std::size_t b = a; b < cuts; ++b) {
        bool fits = static_cast<i64>((b + 1) * n_ / cuts - a * n_ / cuts) >= least_;
        for (std::size_t q = 0; q < q_; ++q) {
          held[q] += sizes[b * q_ + q];
          fits = fits && held[q] <= room_[q];
        }
        i64 own = 0;
        for (std::size_t p = 0; p < p_; ++p) {
          sum[p] += sums[b * p_ + p];
          roof[p] = std::max(roof[p], roofs[b * p_ + p]);
          own += std::max(sum[p], roof[p]);
        }
        if (fits) time[a * (cuts + 1) + b + 1] = own;
      }
    }
    return time;
  }

  // Costs, and the time of num_ranks ranks that each example's longest item takes, without the
  // bits with which what is added up over microbatches and phases would overflow.
  void scale(View<i64> cost, View<i64> longest) {
    i64 largest = 1;
    std::vector<i64> total(p_);
    for (std::size_t x = 0; x < n_ * p_; ++x) {
      total[x % p_] += cost[x];
      largest = std::max(largest, longest[x]);
    }
    const auto phases = static_cast<i64>(p_), roofs = static_cast<i64>(k_ * p_);
    while (static_cast<i128>(largest >> drop_) * d_ * roofs > i128{1} << 60) ++drop_;
    for (const i64 t : total) {
      while ((t >> drop_) > (i64{1} << 60) / phases) ++drop_;
    }
    for (std::size_t x = 0; x < n_ * p_; ++x) {
      cost_[x] = cost[x] >> drop_;
      roof_[x] = (longest[x] >> drop_) * d_;
    }
  }

  // The longest examples, and as many of the others.
  void choose_movable() {
    const std::vector<i32> order = longest_first(kMovable / 2);
    movable_.assign(order.begin(), order.begin() + kMovable / 2);
    const std::size_t stride = (n_ - kMovable / 2) / (kMovable / 2);
    for (std::size_t j = 0; j < kMovable / 2; ++j) {
      movable_.push_back(order[kMovable / 2 + j * stride]);
    }
    std::vector<char> moves(n_);
    for (const i32 i : movable_) moves[i] = 1;
    std::vector<i32> others;
    for (std::size_t i = 0; i < n_; ++i) {
      if (!moves[i]) others.push_back(static_cast<i32>(i));
    }
    raise_roofs(others);
    fixed_ = roofs_;
  }

  // The two largest roofs of each microbatch and phase, with those of these examples.
  void raise_roofs(const std::vector<i32>& examples) {
    roofs_ = fixed_;
    for (const i32 i : examples) {
      for (std::size_t p = 0; p < p_; ++p) {
        i64* at = &roofs_[2 * (static_cast<std::size_t>(micro_of_[i]) * p_ + p)];
        const i64 roof = roof_[static_cast<std::size_t>(i) * p_ + p];
        if (roof > at[0]) {
          at[1] = at[0], at[0] = roof;
        } else {
          at[1] = std::max(at[1], roof);
        }
      }
    }
  }

  // Finds the roofs and how long each microbatch takes, times num_ranks; whether that is more than
  // 0.1% above the work.
  bool waits() {
    raise_roofs(movable_);
    time_.assign(k_, 0);
    i64 work = 0;
    now_ = 0;
    for (std::size_t x = 0; x < k_ * p_; ++x) {
      const i64 time = std::max(sum_[x], roofs_[2 * x]);
      time_[x / p_] += time;
      work += sum_[x], now_ += time;
    }
    return now_ - work > work / 1000;
  }

  i64 without(std::size_t i, std::size_t k) const {
    i64 time = 0;
    for (std::size_t p = 0; p < p_; ++p) {
      const std::size_t at = k * p_ + p, x = i * p_ + p;
      const i64* roofs = &roofs_[2 * at];
      time += std::max(sum_[at] - cost_[x], roofs[roof_[x] == roofs[0]]);
    }
    return time;
  }

  i64 with(std::size_t i, std::size_t k) const {
    i64 time = 0;
    for (std::size_t p = 0; p < p_; ++p) {
      const std::size_t at = k * p_ + p, x = i * p_ + p;
      time += std::max(sum_[at] + cost_[x], std::max(roofs_[2 * at], roof_[x]));
    }
    return time;
  }

  bool has_room(std::size_t i, std::size_t k) const {
    for (std::size_t q = 0; q < q_; ++q) {
      const i64 size = size_[i * q_ + q];
      if (size > 0 && held_[k * q_ + q] + size > room_[q]) return false;
    }
    return true;
  }

  // The first of the best moves, in the order of examples and microbatches; false if none shortens.
  bool best_move() {
    i64 best = 0;
    std::size_t item = n_, to = 0;
    for (const i32 movable : movable_) {
      const auto i = static_cast<std::size_t>(movable);
      const auto from = static_cast<std::size_t>(micro_of_[i]);
      if (count_[from] <= least_) continue;
      const i64 saved = time_[from] - without(i, from);
      if (saved <= best) continue;
      for (std::size_t k = 0; k < k_; ++k) {
        if (k == from) continue;
        const i64 gain = saved - (with(i, k) - time_[k]);
        if (gain > best && has_room(i, k)) best = gain, item = i, to = k;
      }
    }
    if (item == n_) return false;
    const auto from = static_cast<std::size_t>(micro_of_[item]);
    for (std::size_t p = 0; p < p_; ++p) {
      const i64 cost = cost_[item * p_ + p];
      sum_[from * p_ + p] -= cost, sum_[to * p_ + p] += cost;
    }
    for (std::size_t q = 0; q < q_; ++q) {
      const i64 size = size_[item * q_ + q];
      held_[from * q_ + q] -= size, held_[to * q_ + q] += size;
    }
    --count_[from], ++count_[to];
    micro_of_[item] = static_cast<i64>(to);
    return true;
  }

  std::size_t p_, q_, n_, k_;
  int drop_ = 0;
  i64 d_, least_, now_ = 0;
  View<i64> size_, room_;
  std::vector<i64> cost_, roof_, sum_, held_, count_, fixed_, roofs_, time_;
  std::vector<i32> movable_;
  i64* micro_of_;
};

}  // namespace orchmllm
