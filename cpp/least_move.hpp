// `least_move`: minimal movement. Items start where they were sampled (their home); only the surplus of
// overfull nodes travels between nodes, the rest is evened out inside each node.
//
// 1. even_nodes.hpp: nodes above their target give just their surplus to nodes below it.
// 2. even_ranks.hpp: inside each node, ranks above the cap hand their surplus to ranks below it, by
//    exact sums of items where possible and by swaps where not.
// 3. even_ranks.hpp: ranks that are still above the cap trade with ranks of any node.
//
// Where the cap is no multiple of the step of most weights, lift.hpp comes first. If the cap is
// missed, nearby caps are tried, and then a `greedy` assignment near the homes is used as another
// start. The best assignment of all is the result, so that `least_move` is never worse than `greedy`.
#pragma once

#include "bound.hpp"
#include "even_nodes.hpp"
#include "even_ranks.hpp"
#include "greedy.hpp"
#include "lift.hpp"
#include "near_home.hpp"

namespace orchmllm {

class LocalSearch {
 public:
  LocalSearch(const LocalProblem& problem, i64* rank_of)
      : p_(problem),
        rank_of_(rank_of),
        trial_(problem.weight.size),
        step_(common_step(problem.weight)) {
    if (p_.ranks_per_node == 1) p_.ranks_per_node = p_.num_ranks;  // every move is between nodes
    const i64 total = std::accumulate(p_.weight.begin(), p_.weight.end(), i64{0});
    for (const i64 w : p_.weight) {
      if (unit_ != 1) unit_ = std::gcd(unit_, w);
    }
    p_.unit = std::max<i64>(1, unit_);
    mean_ = total / p_.num_ranks + (total % p_.num_ranks != 0);
    p_.budget = std::max<i64>(20000000, 450 * static_cast<i64>(p_.weight.size));
  }

  void run() {
    std::copy(p_.home.begin(), p_.home.end(), rank_of_);
    high_ = max_load(rank_of_);
    if (high_ <= p_.cap) return;
    exact_ = p_.cap <= lower_bound_load(p_.weight, p_.num_ranks);
    if (step_ > 1 && (!exact_ || tight(p_.cap))) start_lifted();
    i64 cap = tight(p_.cap) && exact_ ? above(p_.cap) : tight(p_.cap) ? p_.cap : below(p_.cap);
    i64 low = std::min(cap, p_.cap) - 1;  // not reached
    constexpr i64 kFine = 4000;  // nearer to the bound than this part of it is not worth a try
    for (int attempt = 0; attempt < 8 && high_ > p_.cap && low < cap && cap < high_; ++attempt) {
      try_cap(cap, p_.home, true);
      if (exact_ && high_ - low <= p_.cap / kFine) break;
      if (!exact_ && tight(p_.cap) && high_ <= above(p_.cap)) break;  // the next load there is
      if (high_ > cap) low = std::max(low, cap);
      // A hair above what failed, if loads can be there; else halfway to what is reached.
      const i64 next = above(low + low / kFine / 2);
      cap = !tight(low) && next < high_ ? next : low + (high_ - low) / 2;
    }
    if (high_ > p_.cap) start_from_greedy();
  }

 private:
  static constexpr i64 kWalks = 400;
  bool tight(i64 cap) const { return below(cap) < mean_; }
  i64 below(i64 cap) const { return cap / step_ * step_; }
  i64 above(i64 cap) const { return below(cap) + step_; }

  i64 max_load(const i64* rank_of) const {
    std::vector<i64> load(at(p_.num_ranks));
    for (std::size_t i = 0; i < p_.weight.size; ++i) load[at(rank_of[i])] += p_.weight[i];
    return *std::max_element(load.begin(), load.end());
  }

  void try_cap(i64 cap, View<i64> home, bool between_nodes) {
    LocalProblem attempt = p_;
    attempt.cap = cap;
    attempt.home = home;
    attempt.tight = tight(cap);
    attempt.exact = exact_;
    // Hopeless cases are frequent only when both the steps of the loads and the bound are in the way.
    attempt.budget = tight(cap) ? p_.budget / 6 : p_.budget / 3 * 2;
    if (order_.empty()) order_ = order_ascending(p_.weight);
    solve(attempt, order_, between_nodes);
  }

  void solve(LocalProblem& attempt, const std::vector<i32>& ascending, bool between_nodes) {
    attempt.walks = kWalks;
    Placement placement(attempt, trial_.data());
    if (between_nodes) EvenNodes(placement, ascending);
    EvenRanks(placement, ascending);
    p_.budget -= attempt.budget - placement.budget.left;
    keep_if_lower(trial_);
  }

  void keep_if_lower(const std::vector<i64>& rank_of) {
    const i64 reached = max_load(rank_of.data());
    if (reached < high_) {
      high_ = reached;
      std::copy(rank_of.begin(), rank_of.end(), rank_of_);
    }
  }

  // Loads between multiples of the step (lift.hpp). At tolerance 0 the least cap for which that
  // may be possible, then larger ones.
  void start_lifted() {
    const Remainders remainders(p_.weight, step_);
    LocalProblem attempt = p_;
    for (; attempt.cap < std::min(above(p_.cap), high_); ++attempt.cap) {
      if (remainders.allow(attempt.cap, p_.num_ranks)) {
        const Lift lift(attempt, step_);
        if (lift.possible()) {
          LocalProblem lifted = lift.problem();
          lifted.budget = p_.budget / 3;
          lifted.exact = exact_;
          solve(lifted, order_ascending(lifted.weight), true);
        }
      }
      if (!exact_) return;
    }
  }

  void start_from_greedy() {
    std::vector<i64> start(p_.weight.size);
    greedy(p_.weight, p_.home, p_.num_ranks, start.data());
    const std::vector<i64> rank_of_batch =
        near_home(p_.home, {start.data(), start.size()}, p_.weight, p_.num_ranks,
                  p_.ranks_per_node);
    for (std::size_t i = 0; i < start.size(); ++i) {
      if (p_.weight[i] > 0) start[i] = rank_of_batch[at(start[i])];
    }
    keep_if_lower(start);  // `least_move` is never worse than `greedy`
    p_.budget = std::max<i64>(p_.budget, 100 * static_cast<i64>(start.size()));
    try_cap(p_.cap, {start.data(), start.size()}, false);
  }

  LocalProblem p_;
  i64* rank_of_;
  std::vector<i32> order_;  // made when it is needed: a lift has its own
  std::vector<i64> trial_;
  i64 step_, unit_ = 0, mean_ = 0;
  bool exact_ = false;  // tolerance 0: as near to the bound as possible
  i64 high_ = std::numeric_limits<i64>::max();  // largest load of the best assignment so far
};

}  // namespace orchmllm
