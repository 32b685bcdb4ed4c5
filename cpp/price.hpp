// Which items are cheap to move between nodes, for their weight.
#pragma once

#include "placement.hpp"

namespace orchmllm {

// The price per weight up to which there is about twice the weight that has to move.
class PriceLimit {
 public:
  PriceLimit(const LocalProblem& problem, i64 surplus) : p_(problem) {
    constexpr std::size_t kSamples = 4096;
    const std::size_t stride = std::max<std::size_t>(1, p_.weight.size / kSamples);
    std::vector<i32> sample;
    i128 held = 0;
    for (std::size_t i = 0; i < p_.weight.size; i += stride) {
      if (p_.weight[i] > 0) sample.push_back(static_cast<i32>(i));
    }
    std::sort(sample.begin(), sample.end(), [&](i32 a, i32 b) {
      return cheaper(a, b) || (!cheaper(b, a) && a < b);
    });
    for (const i32 id : sample) {
      dearest_ = id;
      held += static_cast<i128>(p_.weight[at(id)]) * static_cast<i64>(stride);
      if (held >= 2 * static_cast<i128>(surplus)) break;
    }
  }

  bool covers(i32 id) const { return dearest_ >= 0 && !cheaper(dearest_, id); }

 private:
  bool cheaper(i32 a, i32 b) const {
    return static_cast<i128>(p_.move_cost[at(a)]) * p_.weight[at(b)] <
           static_cast<i128>(p_.move_cost[at(b)]) * p_.weight[at(a)];
  }

  const LocalProblem& p_;
  i32 dearest_ = -1;
};

}  // namespace orchmllm
