// The state `least_move` works on: where every item is, and what that makes of each rank.
#pragma once

#include "common.hpp"

namespace orchmllm {

struct Item {
  i64 weight;
  i32 id;
};
using List = std::vector<Item>;  // ascending (weight, id)

inline bool lighter(const Item& a, const Item& b) {
  return a.weight != b.weight ? a.weight < b.weight : a.id < b.id;
}

// First index with weight >= value.
inline std::size_t first_at_least(const List& list, i64 value) {
  const auto before = [](const Item& item, i64 v) { return item.weight < v; };
  return static_cast<std::size_t>(std::lower_bound(list.begin(), list.end(), value, before) -
                                  list.begin());
}

struct Window {
  i64 low, high;
};

// Operations left before a search is given up; a clock would make plans differ between ranks.
struct Budget {
  i64 left;
  bool spend(std::size_t operations) {
    left -= static_cast<i64>(operations);
    return left >= 0;
  }
};

struct LocalProblem {
  View<i64> weight;
  View<i64> home;       // rank from which moving an item costs nothing
  View<i64> move_cost;  // of moving an item between nodes; empty: its weight
  View<i64> held;       // load of each rank that never moves; empty: none
  i64 num_ranks = 1;
  i64 ranks_per_node = 1;
  i64 cap = 0;  // no load may exceed it, if that is possible
};

struct Placement {
  LocalProblem problem;
  i64* rank_of;
  // total: of the items, without what ranks hold; typical: mean weight of those that are not zero
  i64 num_nodes, total = 0, typical = 1;
  std::vector<i64> load, sent, received;   // per rank; the cost of moves between nodes, from home
  i64 send_limit = kNoLimit, receive_limit = kNoLimit;
  Budget budget;

  static constexpr i64 kNoLimit = std::numeric_limits<i64>::max();

  // Starts with the ranks that `out` holds.
  Placement(const LocalProblem& p, i64* out, i64 operations)
      : problem(p),
        rank_of(out),
        num_nodes((p.num_ranks + p.ranks_per_node - 1) / p.ranks_per_node),
        load(p.held.begin(), p.held.end()),
        sent(at(p.num_ranks)),
        received(sent),
        budget{operations} {
    load.resize(at(p.num_ranks));
    i64 positive = 0;
    for (std::size_t i = 0; i < p.weight.size; ++i) {
      load[at(rank_of[i])] += p.weight[i];
      if (rank_of[i] != p.home[i]) count_move({p.weight[i], static_cast<i32>(i)}, 1);
      total += p.weight[i];
      positive += p.weight[i] > 0;
    }
    typical = std::max<i64>(1, total / std::max<i64>(1, positive));
  }

  i64 node_of(i64 rank) const { return rank / problem.ranks_per_node; }
  i64 first_rank(i64 node) const { return node * problem.ranks_per_node; }
  i64 end_rank(i64 node) const {
    return std::min(problem.num_ranks, (node + 1) * problem.ranks_per_node);
  }
  i64 home_of(const Item& item) const { return problem.home[at(item.id)]; }

  // Of moving an item to another node.
  i64 cost(const Item& item) const {
    return problem.move_cost.size > 0 ? problem.move_cost[at(item.id)] : item.weight;
  }
  bool foreign(const Item& item, i64 rank) const {
    return home_of(item) != rank && node_of(home_of(item)) != node_of(rank);
  }

  // Whether a rank may get the items, as far as it may receive.
  bool may_receive(i64 rank, View<Item> items) const {
    const i64 room = receive_limit - received[at(rank)];
    i64 all = 0, more = 0;
    for (const Item& item : items) all += cost(item);
    if (all <= room) return true;  // `foreign` divides: it comes last
    for (const Item& item : items) more += foreign(item, rank) ? cost(item) : 0;
    return more == 0 || more <= room;
  }

  // Whether the items may leave their homes' nodes.
  bool may_send(View<Item> items) const {
    for (const Item& item : items) {
      i64 left = send_limit - sent[at(home_of(item))];
      for (const Item& other : items) left -= home_of(other) == home_of(item) ? cost(other) : 0;
      if (left < 0) return false;
    }
    return true;
  }

  // The mean cost of moving items of so much weight.
  i64 cost_of_weight(i64 weight) const {
    const View<i64>& costs = problem.move_cost;
    if (costs.size == 0) return weight;
    const i128 all = std::accumulate(costs.begin(), costs.end(), i64{0});
    return static_cast<i64>(std::min<i128>(kNoLimit, all * weight / std::max<i64>(1, total)));
  }

  // The least loaded of ranks [begin, end) that may still receive the item; when none may, the one
  // that has received least.
  i64 roomiest(i64 begin, i64 end, const Item& item) const {
    const auto key = [&](i64 rank) {
      const bool full = cost(item) > receive_limit - received[at(rank)];
      return std::pair<bool, i64>(full, full ? received[at(rank)] : load[at(rank)]);
    };
    i64 best = begin;
    for (i64 r = begin + 1; r < end; ++r) {
      if (key(r) < key(best)) best = r;
    }
    return best;
  }

  void move(const Item& item, i64 to) {
    i64& rank = rank_of[item.id];
    count_move(item, -1);
    load[at(rank)] -= item.weight;
    rank = to;
    load[at(rank)] += item.weight;
    count_move(item, 1);
  }

 private:
  void count_move(const Item& item, i64 sign) {
    const i64 rank = rank_of[item.id];
    if (!foreign(item, rank)) return;
    sent[at(home_of(item))] += sign * cost(item);
    received[at(rank)] += sign * cost(item);
  }
};

}  // namespace orchmllm
