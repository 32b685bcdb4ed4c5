// `least_move` where nearly all weights are multiples of a step and the cap is not.
//
// Most loads can then only be multiples of the step, up to the last one B under the cap. What is
// between B and the cap is of use to ranks with items whose weights are not multiples, and if the
// mean is above B some ranks must end there. Such an item with a remainder up to cap - B is left
// where it is, or moved inside its node, so that the remainders on a rank sum to cap - B at most,
// and counts without its remainder. Two with larger remainders that make one so small are put
// together; others count as the next multiple. Every assignment with loads <= B of these multiples
// has loads <= cap of the real weights. Counted in steps, exact sums of multiples are easy to find.
#pragma once

#include <array>

#include "placement.hpp"

namespace orchmllm {

// How many weights there are of each remainder modulo the step.
class Remainders {
 public:
  Remainders(View<i64> weight, i64 step) : step_(step), count_(at(step)) {
    for (const i64 w : weight) {
      ++count_[at(w % step)];
      steps_ += w / step;
    }
  }

  // Whether the steps fit if every remainder up to cap % step is left out and all larger ones are
  // in pairs that save a step.
  bool allow(i64 cap, i64 num_ranks) const {
    i64 large = 0;
    for (i64 rest = cap % step_ + 1; rest < step_; ++rest) large += count_[at(rest)];
    return static_cast<i128>(steps_) + (large + 1) / 2 <=
           static_cast<i128>(cap / step_) * num_ranks;
  }

 private:
  i64 step_, steps_ = 0;
  std::vector<i64> count_;
};

class Lift {
 public:
  Lift(const LocalProblem& problem, i64 step)
      : p_(problem),
        step_(step),
        over_(problem.cap % step),
        weight_(problem.weight.size),
        home_(problem.home.begin(), problem.home.end()),
        base_(at(problem.num_ranks)),
        room_(at(problem.num_ranks), over_) {
    std::vector<std::size_t> crowded;
    std::vector<Large> large;
    i128 total = 0;
    for (std::size_t i = 0; i < weight_.size(); ++i) {
      const i64 rest = p_.weight[i] % step_;
      weight_[i] = p_.weight[i] / step_ + (rest > 0);
      total += weight_[i];
      if (rest > over_) {
        large.push_back({home_[i] / p_.ranks_per_node, rest, static_cast<i64>(i)});
      } else if (rest > 0 && !fix({i}, rest, home_[i])) {
        crowded.push_back(i);
      }
    }
    for (const std::size_t i : crowded) fix({i}, p_.weight[i] % step_, roomiest(i));
    fix_pairs(large);
    possible_ = total - saved_ <= static_cast<i128>(p_.cap / step_) * p_.num_ranks;
  }

  // Whether the steps fit under B at all.
  bool possible() const { return possible_; }

  LocalProblem problem() const {
    LocalProblem lifted = p_;
    lifted.weight = {weight_.data(), weight_.size()};
    lifted.home = {home_.data(), home_.size()};
    lifted.base = {base_.data(), base_.size()};
    lifted.cap = p_.cap / step_;
    lifted.unit = 1;
    return lifted;
  }

 private:
  using Large = std::array<i64, 3>;  // node, remainder, item

  // The items stay on the rank for good, if what their remainders leave over a multiple fits there.
  bool fix(std::initializer_list<std::size_t> items, i64 rest, i64 rank) {
    if (rest > room_[at(rank)]) return false;
    room_[at(rank)] -= rest;
    i64 weight = -rest;
    for (const std::size_t i : items) {
      weight += p_.weight[i];
      home_[i] = rank;
      weight_[i] = 0;
    }
    base_[at(rank)] += weight / step_;
    ++saved_;
    return true;
  }

  // The rank with most room for remainders in the node of an item.
  i64 roomiest(std::size_t item) const {
    const i64 first = home_[item] - home_[item] % p_.ranks_per_node;
    const i64 end = std::min(p_.num_ranks, first + p_.ranks_per_node);
    return std::max_element(room_.begin() + first, room_.begin() + end) - room_.begin();
  }

  // Inside each node, the largest remainder with the smallest that completes a step.
  void fix_pairs(std::vector<Large>& large) {
    std::sort(large.begin(), large.end());
    for (std::size_t begin = 0, end = 0; begin < large.size(); begin = end) {
      while (end < large.size() && large[end][0] == large[begin][0]) ++end;
      std::size_t low = begin, high = end - 1;
      while (low < high) {
        const i64 rest = large[low][1] + large[high][1] - step_;
        const std::size_t a = at(large[low][2]), b = at(large[high][2]);
        if (rest < 0) {
          ++low;
        } else if (rest > over_ || !fix({a, b}, rest, roomiest(a))) {
          --high;
        } else {
          ++low, --high;
        }
      }
    }
  }

  const LocalProblem& p_;
  i64 step_, over_;
  i64 saved_ = 0;  // steps below the weights rounded up
  bool possible_ = false;
  std::vector<i64> weight_, home_, base_, room_;
};

}  // namespace orchmllm
