// `least_move`: minimal movement. Items start where they were sampled (their home); only the surplus of
// overfull nodes travels between nodes, the rest is evened out inside each node.
//
// 1. Nodes above their target trade with nodes below it (trading.hpp): items that are cheap to move
//    first, and no rank sends or receives much more than an even share of the largest surplus.
// 2. Inside each node, ranks above the cap trade with ranks below it; then with those of any node.
// 3. A miss: the same from a `greedy` assignment near the homes. The best assignment of all is the
//    result, so that `least_move` is never worse than `greedy`.
// 4. A cap that is less than 0.1% above the bound: the same under lower and lower caps.
#pragma once

#include "bound.hpp"
#include "greedy.hpp"
#include "near_home.hpp"
#include "price.hpp"
#include "trading.hpp"

namespace orchmllm {

class LocalSearch {
 public:
  LocalSearch(const LocalProblem& problem, i64* rank_of)
      : p_(problem), best_(rank_of), trial_(problem.weight.size) {
    if (p_.ranks_per_node == 1) p_.ranks_per_node = p_.num_ranks;  // every move is between nodes
  }

  // Returns the operations that it took.
  i64 run() {
    std::copy(p_.home.begin(), p_.home.end(), best_);
    high_ = max_load(best_);
    if (high_ <= p_.cap) return 0;
    order_ = order_ascending(p_.weight);
    const i64 bound = lower_bound_load(p_.weight, p_.num_ranks);
    const i64 loose = std::max(p_.cap, bound + bound / 1000);
    num_items_ = std::count_if(p_.weight.begin(), p_.weight.end(), [](i64 w) { return w > 0; });
    const i64 operations = std::min<i64>(32000000, 4000 * num_items_) + 80 * num_items_;
    const bool home_is_near = !nearly_all_moves();
    if (home_is_near) {
      const i64 left = attempt_from_home(loose, operations);
      tighten(loose, left + operations / 2);  // where the cap is out of reach, lower loads are not
    }
    if (high_ > loose) {
      start_from_greedy();
      if (high_ > loose) {
        // Where that one is not kept, nothing but the cap is worth all that it moves.
        if (max_load(trial_.data()) > high_) high_ = loose + 1;
        tighten(loose, attempt(loose, operations / 4, false));
        high_ = max_load(best_);
      }
    }
    if (high_ > p_.cap && high_ <= loose) {
      tighten(p_.cap, operations);
      if (high_ > p_.cap) start_from_greedy();
    }
    return spent_;
  }

 private:
  i64 max_load(const i64* rank_of) const {
    std::vector<i64> load(at(p_.num_ranks));
    for (std::size_t i = 0; i < p_.weight.size; ++i) load[at(rank_of[i])] += p_.weight[i];
    return *std::max_element(load.begin(), load.end());
  }

  // Whether more than 15 of 16 parts of the load are too much for the nodes it is on: a `greedy`
  // assignment moves no more than that.
  bool nearly_all_moves() const {
    const i64 width = p_.ranks_per_node;
    std::vector<i128> node(at((p_.num_ranks + width - 1) / width));
    i128 total = 0, over = 0;
    for (std::size_t i = 0; i < p_.weight.size; ++i) {
      node[at(p_.home[i] / width)] += p_.weight[i];
      total += p_.weight[i];
    }
    for (const i128 load : node) over += std::max<i128>(0, load - static_cast<i128>(p_.cap) * width);
    return 16 * over > 15 * total;
  }

  i64 attempt_from_home(i64 cap, i64 operations) {
    std::copy(p_.home.begin(), p_.home.end(), trial_.begin());
    return attempt(cap, operations, true);
  }

  // Goes on from trial_; returns the operations left.
  i64 attempt(i64 cap, i64 operations, bool from_home) {
    LocalProblem problem = p_;
    problem.cap = cap;
    Placement placement(problem, trial_.data(), operations - 4 * num_items_);
    if (placement.num_nodes > 1) {
      const i64 target = cap - free_room(placement);
      if (from_home) limit_moves(placement, target);
      Trading(placement, order_, p_.ranks_per_node, target, [](i32) { return true; })
          .even(range(0, placement.num_nodes));
    }
    if (placement.budget.left >= 0) even_ranks(placement);
    keep_if_lower();
    spent_ += operations - placement.budget.left;
    return placement.budget.left;
  }

  // Inside each node, then between any ranks.
  void even_ranks(Placement& s) const {
    s.send_limit = Placement::kNoLimit;
    Trading ranks(s, order_, 1, s.problem.cap, [](i32) { return true; });
    bool done = true;
    for (i64 node = 0; node < s.num_nodes; ++node) {
      done = ranks.even(range(s.first_rank(node), s.end_rank(node))) && done;
    }
    s.receive_limit = Placement::kNoLimit;  // a fuller rank costs more than that
    if (!done) ranks.even(range(0, p_.num_ranks));
  }

  // Of a rank, in the mean of its node, without which its ranks could not be evened out: half of
  // what there is, at most a 64th of an item.
  i64 free_room(const Placement& s) const {
    const i128 slack = static_cast<i128>(s.problem.cap) * p_.num_ranks - s.total;
    return static_cast<i64>(std::min<i128>(
        std::max<i128>(0, slack) / 2 / p_.num_ranks, s.typical / 64));
  }

  // The least that no rank of a node has to send more than, for the node to be rid of `surplus`:
  // those that hold less send all that they hold.
  i64 even_share(const Placement& s, i64 node, i64 surplus) const {
    std::vector<i64> held(s.load.begin() + s.first_rank(node), s.load.begin() + s.end_rank(node));
    std::sort(held.begin(), held.end());
    for (std::size_t k = 0; k < held.size(); ++k) {
      const i64 share = surplus / static_cast<i64>(held.size() - k);
      if (held[k] >= share) return share;
      surplus -= held[k];
    }
    return surplus;
  }

  // A rank is to send and receive little more than an even share of the largest surplus of a node,
  // or one item. What is cheap to move goes at once.
  void limit_moves(Placement& s, i64 target) const {
    i64 most = 0, share = 0, room = 0, surplus = 0;
    for (i64 node = 0; node < s.num_nodes; ++node) {
      const i64 width = s.end_rank(node) - s.first_rank(node);
      i64 mean = 0;
      for (i64 r = s.first_rank(node); r < s.end_rank(node); ++r) mean += s.load[at(r)] / width;
      most = std::max(most, mean - target);
      share = std::max(share, even_share(s, node, (mean - target) * width));
      room = std::max(room, target - mean);
      surplus += std::max<i64>(0, mean - target) * width;
    }
    // Ranks need not receive more than the largest surplus just because one node is nearly empty.
    room = std::max(most, std::min(room, most + most / 2));
    s.send_limit = s.cost_of_weight(std::max(share + share / 16, s.typical));
    s.receive_limit = s.cost_of_weight(std::max(room + room / 16, s.typical));
    if (p_.move_cost.size == 0) return;
    const PriceLimit price(p_, surplus);
    const auto cheap = [&](i32 id) { return price.covers(id); };
    Trading(s, order_, p_.ranks_per_node, target, cheap).even(range(0, s.num_nodes),
                                                                 Trading::kWhatFits);
  }

  void keep_if_lower() {
    const i64 reached = max_load(trial_.data());
    if (reached >= high_) return;
    high_ = reached;
    std::copy(trial_.begin(), trial_.end(), best_);
  }

  // Goes on from the best assignment, under caps halfway between what is reached and what is not,
  // and when they are near, under the cap itself.
  void tighten(i64 cap, i64 operations) {
    const i64 fine = 1 + cap / 65536;  // nearer is not worth an attempt
    for (i64 low = cap; high_ > cap && operations > 0;) {
      const bool near = high_ - low <= fine;
      if (near && low > cap) return;
      const i64 next = near ? cap : low + (high_ - low) / 2;
      std::copy(best_, best_ + trial_.size(), trial_.begin());
      const i64 part = operations / 4;  // one that does not end is not to use up all of them
      operations -= part - attempt(next, part, false);
      if (near) return;
      if (high_ > next) low = next;
    }
  }

  void start_from_greedy() {
    spent_ += 60 * num_items_;
    greedy(p_.weight, p_.home, p_.num_ranks, trial_.data());
    const std::vector<i64> rank_of_batch =
        near_home(p_.home, {trial_.data(), trial_.size()}, p_.weight, p_.num_ranks,
                  p_.ranks_per_node);
    for (std::size_t i = 0; i < trial_.size(); ++i) {
      if (p_.weight[i] > 0) trial_[i] = rank_of_batch[at(trial_[i])];
    }
    keep_if_lower();
  }

  LocalProblem p_;
  i64* best_;
  std::vector<i32> order_;
  std::vector<i64> trial_;
  i64 num_items_ = 0;  // of positive weight
  i64 spent_ = 0;
  i64 high_ = std::numeric_limits<i64>::max();  // largest load of the best assignment so far
};

}  // namespace orchmllm
