// `least_move`: minimal movement. Items start where they were sampled (their home); only the
// surplus of overfull nodes travels between nodes, the rest is evened out inside each node.
// A plan from home under a cap (`attempt`):
// 1. Nodes above their target trade with nodes below it (trading.hpp): items that are cheap to move
//    first, and no rank sends or receives much more than an even share of the largest surplus.
// 2. Inside each node, ranks above the cap trade with ranks below it. A node that stays crowded
//    sends a little more to other nodes and tries again.
// 3. What is left trades with ranks of any node.
// Where there is none, or it moves much, there is one from the plan of `greedy` (`near_greedy`),
// which knows how many heavy items each rank can hold.
//
// A looser tolerance never moves more. Each of kTolerances has its plan, or none. The result is the
// plan that moves least of those of the accepted tolerance and of all tighter ones; those that cannot
// move less, by the surplus of the nodes, are not made. Where there is none, it is the plan of the
// next tolerance that has one, taken further until no load is above the largest of `greedy`: what
// goes on from a plan brings no item back to its node, so that it moves no less. Where that fails,
// the result is `greedy`.
#pragma once

#include "bound.hpp"
#include "greedy.hpp"
#include "near_home.hpp"
#include "price.hpp"
#include "trading.hpp"

namespace orchmllm {

// The tolerances that have plans from home. One in between counts as the next below, one below the
// first as 0 (load_cap of orchmllm/plan/balance.py), which goes on from the plan of the first.
constexpr double kTolerances[] = {.001, .002, .005, .01, .02, .05, .1, .2, .5, 1};

class LocalSearch {
 public:
  LocalSearch(const LocalProblem& problem, i64* rank_of)
      : p_(problem),
        width_(problem.ranks_per_node),
        best_(rank_of),
        trial_(problem.weight.size),
        node_load_(at((problem.num_ranks + width_ - 1) / width_)) {
    if (width_ == 1) p_.ranks_per_node = p_.num_ranks;  // every move is between nodes
  }

  // Returns the operations that it took.
  i64 run() {
    std::copy(p_.home.begin(), p_.home.end(), best_);
    if (max_load(best_) <= p_.cap) return 0;
    for (std::size_t i = 0; i < p_.weight.size; ++i) {
      node_load_[at(p_.home[i] / width_)] += p_.weight[i];
      num_items_ += p_.weight[i] > 0;
    }
    for (std::size_t r = 0; r < p_.held.size; ++r) {
      node_load_[r / at(width_)] += p_.held[r];
    }
    order_ = order_ascending(p_.weight);
    operations_ = std::min<i64>(32000000, 4000 * num_items_) + 80 * num_items_;
    const i64 bound = lower_bound_load(p_.weight, p_.num_ranks, p_.held);
    std::vector<i64> caps;
    for (const double tolerance : kTolerances) {
      caps.push_back(bound + static_cast<i64>(static_cast<double>(bound) * tolerance));
    }
    const i64 cap = std::max(p_.cap, caps[0]);
    plan_for(cap);
    for (auto c = caps.rbegin(); c != caps.rend(); ++c) {
      if (*c < cap && has_to_move(*c) < moved_) plan_for(*c);
    }
    for (const i64 c : caps) {
      if (c > cap && moved_ == kNoPlan) plan_for(c);
    }
    if (num_items_ <= kFew && greedy_load() <= cap) offer(greedy_);
    if (high_ > cap) match_greedy();
    // By the same steps for every tolerance that is missed, so that a looser one ends them sooner.
    const i64 lowest = p_.cap < caps[0] ? p_.cap : bound;
    if (high_ > p_.cap) tighten(std::max(lowest, crowding_));
    if (high_ > p_.cap) match_greedy();
    return spent_;
  }

 private:
  static constexpr i128 kNoPlan = i128{1} << 100;
  static constexpr i64 kFew = 4096;  // items, for which `greedy` takes no time
  static constexpr int kRounds = 8;
  enum Start { kHome, kPlan, kGreedy };  // what an attempt starts from

  i64 max_load(const i64* rank_of) const {
    std::vector<i64> load(p_.held.begin(), p_.held.end());
    load.resize(at(p_.num_ranks));
    for (std::size_t i = 0; i < p_.weight.size; ++i) load[at(rank_of[i])] += p_.weight[i];
    return *std::max_element(load.begin(), load.end());
  }

  // Whether an item has left its node.
  bool away(std::size_t item, i64 rank) const {
    return p_.home[item] != rank && p_.home[item] / width_ != rank / width_;
  }

  // The weight that has to leave its node at least, under a cap.
  i128 has_to_move(i64 cap) const {
    i128 sum = 0;
    for (std::size_t k = 0; k < node_load_.size(); ++k) {
      const i64 ranks = std::min(width_, p_.num_ranks - static_cast<i64>(k) * width_);
      sum += std::max<i128>(0, node_load_[k] - static_cast<i128>(cap) * ranks);
    }
    return sum;
  }

  // Offers the plan from home without loads above `cap`; where it moves much, also that from `greedy`.
  void plan_for(i64 cap) {
    std::copy(p_.home.begin(), p_.home.end(), trial_.begin());
    if (cap >= crowding_) attempt(cap, operations_, kHome);
    if (max_load(trial_.data()) <= cap) {
      if (2 * i128{offer(trial_)} <= 3 * has_to_move(cap)) return;
    } else if (crowding_ == 0) {
      crowding_ = crowding_bound(p_.weight, order_, p_.num_ranks);
    }
    if (cap < crowding_ || greedy_load() > cap + cap / 1024) return;
    if (near_greedy(cap)) offer(trial_);
  }

  // trial_ becomes the plan of `greedy` with more items on the node of their home, and its loads are
  // brought under the cap. False where they are not.
  bool near_greedy(i64 cap) {
    trial_ = nearer_home(greedy_, p_.weight, p_.home, order_, p_.num_ranks, width_);
    spent_ += 8 * num_items_;
    if (max_load(trial_.data()) > cap) attempt(cap, operations_, kGreedy);
    return max_load(trial_.data()) <= cap;
  }

  // Takes a plan that moves less than the best. Returns the weight that it moves.
  i64 offer(const std::vector<i64>& rank_of) {
    i64 moved = 0;
    for (std::size_t i = 0; i < rank_of.size(); ++i) {
      if (away(i, rank_of[i])) moved += p_.weight[i];
    }
    if (moved < moved_) {
      moved_ = moved;
      take(rank_of);
    }
    return moved;
  }

  void take(const std::vector<i64>& rank_of) {
    std::copy(rank_of.begin(), rank_of.end(), best_);
    high_ = max_load(best_);
  }

  // Goes on from trial_; returns the operations left. Unless it starts from home, what has left its
  // node stays away.
  i64 attempt(i64 cap, i64 operations, Start start) {
    LocalProblem problem = p_;
    problem.cap = cap;
    Placement s(problem, trial_.data(), operations - 4 * num_items_);
    const auto free = [&](i32 id) { return start == kHome || !away(at(id), trial_[at(id)]); };
    const i64 target = start == kGreedy ? cap : cap - free_room(s);
    if (start == kHome && s.num_nodes > 1) limit_moves(s, target);
    Trading nodes(s, order_, p_.ranks_per_node, target, free);
    std::vector<i64> crowded = even(s, nodes, free);
    i128 left = all_room(s) / 4;
    for (int k = 0; k < kRounds && make_room(s, nodes, crowded, left); ++k) {
      crowded = even(s, nodes, free);
    }
    s.receive_limit = Placement::kNoLimit;  // a fuller rank costs more than that
    if (!crowded.empty()) {
      Trading(s, order_, 1, cap, free).even(range(0, p_.num_ranks), Trading::kSingle, true);
    }
    spent_ += operations - s.budget.left;
    return s.budget.left;
  }

  // Nodes trade, then the ranks of each. Returns the nodes of which a rank stays above the cap.
  template <class Filter>
  std::vector<i64> even(Placement& s, Trading& nodes, const Filter& free) const {
    nodes.even(range(0, s.num_nodes));
    Trading ranks(s, order_, 1, s.problem.cap, [&](i32 id) { return width_ > 1 || free(id); });
    std::vector<i64> crowded;
    for (i64 node = 0; node < s.num_nodes; ++node) {
      if (!ranks.even(range(s.first_rank(node), s.end_rank(node)))) crowded.push_back(node);
    }
    return crowded;
  }

  // Keeps room free in crowded nodes, by what their ranks are above the cap and a little more,
  // while `left` of the room of all nodes is enough for that. False if it made none.
  bool make_room(const Placement& s, Trading& nodes, const std::vector<i64>& crowded,
                 i128& left) const {
    const i64 little = 8 * free_room(s);
    bool made = false;
    for (const i64 node : crowded) {
      i64 room = little;
      for (i64 r = s.first_rank(node); r < s.end_rank(node); ++r) {
        room += std::max<i64>(0, s.load[at(r)] - s.problem.cap);
      }
      if (s.num_nodes == 1 || room > left) continue;
      left -= room;
      nodes.keep_free(node, room);
      made = true;
    }
    return made;
  }

  i128 all_room(const Placement& s) const {
    return std::max<i128>(0, static_cast<i128>(s.problem.cap) * p_.num_ranks - s.total -
                                 total(p_.held));
  }

  // Of a rank, in the mean of its node, without which its ranks could not be evened out: half of
  // what there is, at most a 64th of an item.
  i64 free_room(const Placement& s) const {
    return static_cast<i64>(std::min<i128>(all_room(s) / 2 / p_.num_ranks, s.typical / 64));
  }

  // The least that no rank of a node has to send more than, for the node to be rid of `surplus`:
  // those whose items weigh less send all of them.
  i64 even_share(const Placement& s, i64 node, i64 surplus) const {
    std::vector<i64> items(s.load.begin() + s.first_rank(node), s.load.begin() + s.end_rank(node));
    for (std::size_t k = 0; k < items.size() && p_.held.size > 0; ++k) {
      items[k] -= p_.held[at(s.first_rank(node)) + k];
    }
    std::sort(items.begin(), items.end());
    for (std::size_t k = 0; k < items.size(); ++k) {
      const i64 share = surplus / static_cast<i64>(items.size() - k);
      if (items[k] >= share) return share;
      surplus -= items[k];
    }
    return items.back();
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
      share = std::max(share, even_share(s, node, std::max<i64>(0, mean - target) * width));
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

  // From the best plan under a lower cap; returns the operations left.
  i64 go_on(i64 cap, i64 operations) {
    std::copy(best_, best_ + trial_.size(), trial_.begin());
    const i64 left = attempt(cap, operations, kPlan);
    if (max_load(trial_.data()) < high_) take(trial_);
    return left;
  }

  // Until no load is above what is accepted: goes on under caps halfway between what is reached and
  // what is not, and when they are near, under `cap` itself.
  void tighten(i64 cap) {
    i64 operations = operations_;
    const i64 fine = 1 + cap / 65536;  // nearer is not worth an attempt
    for (i64 low = cap; high_ > std::max(cap, p_.cap) && operations > 0;) {
      const bool near = high_ - low <= fine;
      if (near && low > cap) return;
      const i64 next = near ? cap : low + (high_ - low) / 2;
      const i64 part = operations / 4;  // one that does not end is not to use up all of them
      operations -= part - go_on(next, part);
      if (near) return;
      if (high_ > next) low = next;
    }
  }

  // Until no load is above the largest of `greedy`, which is taken where that fails.
  void match_greedy() {
    if (high_ > greedy_load()) go_on(greedy_load(), operations_);
    if (high_ > greedy_load()) take(greedy_);
  }

  // The largest load of `greedy`, whose batches are placed near the homes; where ranks hold load,
  // none may change its rank.
  i64 greedy_load() {
    if (!greedy_.empty()) return greedy_load_;
    spent_ += 60 * num_items_;
    greedy_.resize(trial_.size());
    greedy(p_.weight, p_.home, p_.num_ranks, greedy_.data(), p_.held);
    greedy_load_ = max_load(greedy_.data());
    if (p_.held.size > 0) return greedy_load_;
    const std::vector<i64> rank_of_batch =
        near_home(p_.home, {greedy_.data(), greedy_.size()}, p_.weight, p_.num_ranks,
                  p_.ranks_per_node);
    for (std::size_t i = 0; i < greedy_.size(); ++i) {
      if (p_.weight[i] > 0) greedy_[i] = rank_of_batch[at(greedy_[i])];
    }
    return greedy_load_;
  }

  LocalProblem p_;
  i64 width_;  // ranks of a node
  i64* best_;
  std::vector<i64> trial_, greedy_;
  std::vector<i32> order_;
  std::vector<i128> node_load_;  // at home
  i64 num_items_ = 0;            // of positive weight
  i64 operations_ = 0, spent_ = 0;
  i64 high_ = 0, greedy_load_ = 0;  // largest load of the best plan, and of greedy_
  i64 crowding_ = 0;  // no largest load is below this
  i128 moved_ = kNoPlan;
};

}  // namespace orchmllm
