// The state `least_move` works on: where every item is, and what that makes of each rank.
#pragma once

#include "bound.hpp"
#include "pick.hpp"

namespace orchmllm {

inline std::size_t at(i64 index) { return static_cast<std::size_t>(index); }

struct LocalProblem {
  View<i64> weight;
  View<i64> home;       // rank from which moving an item costs nothing
  View<i64> move_cost;  // of moving an item between nodes; empty: its weight
  View<i64> base;       // load of each rank beside the items; empty: none
  i64 num_ranks = 1;
  i64 ranks_per_node = 1;
  i64 cap = 0;         // no load may exceed it, if that is possible
  bool tight = false;  // loads of most ranks cannot come near the cap: plan with the mean instead
  bool exact = false;  // the cap is the lower bound: balance is worth some movement
  i64 unit = 1;        // all weights are multiples of it
  i64 budget = 0;      // operations
  i64 walks = 0;       // swaps that lower no load, when nothing else is left
};

struct Placement {
  LocalProblem problem;
  i64* rank_of;
  i64 num_nodes, total = 0, typical = 1;  // typical: mean weight of those that are not zero
  i64 send_limit = 0, receive_limit = std::numeric_limits<i64>::max();
  std::vector<i64> load, sent, received;  // per rank; sent and received between nodes only
  Budget budget;

  Placement(const LocalProblem& p, i64* out)
      : problem(p),
        rank_of(out),
        num_nodes((p.num_ranks + p.ranks_per_node - 1) / p.ranks_per_node),
        load(at(p.num_ranks)),
        sent(at(p.num_ranks)),
        received(at(p.num_ranks)),
        budget{p.budget} {
    i64 positive = 0;
    for (std::size_t i = 0; i < p.weight.size; ++i) {
      rank_of[i] = p.home[i];
      load[at(p.home[i])] += p.weight[i];
      total += p.weight[i];
      positive += p.weight[i] > 0;
    }
    typical = std::max<i64>(1, total / std::max<i64>(1, positive));
    for (std::size_t r = 0; r < p.base.size; ++r) {
      load[r] += p.base[r];
      total += p.base[r];
    }
  }

  i64 first_rank(i64 node) const { return node * problem.ranks_per_node; }
  i64 end_rank(i64 node) const {
    return std::min(problem.num_ranks, (node + 1) * problem.ranks_per_node);
  }
  i64 width(i64 node) const { return end_rank(node) - first_rank(node); }
  i64 home_of(const Item& item) const { return problem.home[at(item.id)]; }
  bool foreign(const Item& item, i64 rank) const {
    return home_of(item) / problem.ranks_per_node != rank / problem.ranks_per_node;
  }
  bool apart(i64 a, i64 b) const {
    return a / problem.ranks_per_node != b / problem.ranks_per_node;
  }
  // What is on a rank beside the items.
  i64 base(i64 rank) const { return problem.base.size > 0 ? problem.base[at(rank)] : 0; }

  void move(const Item& item, i64 to) {
    const i64 from = rank_of[item.id];
    if (foreign(item, from)) received[at(from)] -= item.weight;
    if (foreign(item, to)) received[at(to)] += item.weight;
    load[at(from)] -= item.weight;
    load[at(to)] += item.weight;
    rank_of[item.id] = to;
  }
};

// Which items a rank may get: its own node's always, others while it has received little.
struct ReceiveRule {
  const Placement& placement;
  i64 rank;
  i64 taken = 0;  // of other nodes, not moved yet
  i64 counted(const Item& item) const { return placement.foreign(item, rank) ? item.weight : 0; }
  i64 room() const {
    return std::max<i64>(0, placement.receive_limit - placement.received[at(rank)] - taken);
  }
  // What is counted divides: it comes last.
  bool admits(const Item& item) const { return item.weight <= room() || counted(item) <= room(); }
  bool admits_both(const Item& a, const Item& b) const {
    return a.weight + b.weight <= room() || counted(a) + counted(b) <= room();
  }
  void take(const Item& item) { taken += counted(item); }
};

}  // namespace orchmllm
