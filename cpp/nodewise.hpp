// Node-wise rearrangement (OrchMLLM Algorithm 3): which node processes which given batch, so that
// the busiest rank sends as little as possible to other nodes.
//
// A deterministic tabu search over swaps of two batches. Each step relieves the busiest rank: its
// node gets a batch that the rank holds much of, for one of its own. Among those swaps the one with
// the least potential (squared excess over a goal slightly below the best maximum so far) is made,
// even if it is no improvement; the batches it moved rest for a while.
#pragma once

#include "near_home.hpp"

namespace orchmllm {

struct Transfers {
  View<i64> source, batch, volume;  // (m,) triplets
  i64 num_ranks, ranks_per_node;
};

class NodewiseSearch {
 public:
  explicit NodewiseSearch(const Transfers& t) : t_(t), d_(at(t.num_ranks)) {
    index(t.source, t.batch, by_source_, source_start_);
    index(t.batch, t.source, by_batch_, batch_start_);
  }

  std::vector<i64> run(i64 steps) {
    std::vector<i64> rank_of =
        near_home(t_.source, t_.batch, t_.volume, t_.num_ranks, t_.ranks_per_node);
    node_of_.resize(d_);
    members_.assign(at((t_.num_ranks + t_.ranks_per_node - 1) / t_.ranks_per_node), {});
    for (std::size_t b = 0; b < d_; ++b) {
      node_of_[b] = node(rank_of[b]);
      members_[at(node_of_[b])].push_back(static_cast<i64>(b));
    }
    measure();
    std::vector<i64> best_nodes = node_of_;
    i64 best = *std::max_element(traffic_.begin(), traffic_.end());
    std::vector<i64> rests(d_, -1);
    const i64 patience = d_ <= kFew ? steps : kPatience;
    for (i64 step = 0, last = 0; step < steps && step - last < patience && best > 0; ++step) {
      goal_ = best - best / 32;
      if (d_ <= kFew && step > last && (step - last) % kKick == 0) kick();
      if (!relieve(step, rests) && d_ > kFew) break;
      const i64 now = *std::max_element(traffic_.begin(), traffic_.end());
      if (now < best) best = now, best_nodes = node_of_, last = step;
    }
    return ranks_inside(t_.source, t_.batch, t_.volume, t_.num_ranks, t_.ranks_per_node, best_nodes);
  }

 private:
  static constexpr i64 kPatience = 1500, kKick = 100;  // steps without a new best
  static constexpr std::size_t kFew = 32;  // batches; for so few the optimum is within reach

  struct Entry {
    i64 other, volume;
  };

  i64 node(i64 rank) const { return rank / t_.ranks_per_node; }

  // Entries (other, summed volume) of each key, sorted by other.
  void index(View<i64> key, View<i64> other, std::vector<Entry>& entries,
             std::vector<std::size_t>& start) const {
    entries.clear();
    start.assign(d_ + 1, 0);
    for (const Share& s : shares_of(other, key, t_.volume)) {
      if (s.volume == 0) continue;
      entries.push_back({s.place, s.volume});
      ++start[at(s.batch) + 1];
    }
    std::partial_sum(start.begin(), start.end(), start.begin());
  }

  // Calls visit(rank, volume) for what the ranks of node k hold of batch b.
  template <class Visit>
  void held(i64 b, i64 k, const Visit& visit) const {
    const auto begin = by_batch_.begin() + static_cast<std::ptrdiff_t>(batch_start_[at(b)]);
    const auto end = by_batch_.begin() + static_cast<std::ptrdiff_t>(batch_start_[at(b) + 1]);
    auto e = std::lower_bound(begin, end, k * t_.ranks_per_node,
                              [](const Entry& entry, i64 rank) { return entry.other < rank; });
    for (; e != end && e->other < (k + 1) * t_.ranks_per_node; ++e) visit(e->other, e->volume);
  }

  // traffic_[i]: what rank i sends to other nodes.
  void measure() {
    traffic_.assign(d_, 0);
    for (std::size_t b = 0; b < d_; ++b) {
      for (std::size_t e = batch_start_[b]; e < batch_start_[b + 1]; ++e) {
        if (node(by_batch_[e].other) == node_of_[b]) continue;
        traffic_[at(by_batch_[e].other)] += by_batch_[e].volume;
      }
    }
  }

  // Adds the traffic of batch b leaving node k (sign 1) or coming to it (-1) to `change`.
  void shift(i64 b, i64 k, i64 sign, std::vector<std::pair<std::size_t, i64>>& change) const {
    held(b, k, [&](i64 rank, i64 volume) { change.emplace_back(at(rank), sign * volume); });
  }

  double excess(i64 traffic) const {  // doubles hold these integers and their squares' order exactly
    const double over = static_cast<double>(std::max<i64>(0, traffic - goal_));
    return over * over;
  }

  // Change of the potential if a and b swap nodes. Uses and clears `delta_`.
  double price(i64 a, i64 b) {
    change_.clear();
    shift(a, node_of_[at(a)], 1, change_);
    shift(b, node_of_[at(b)], 1, change_);
    shift(a, node_of_[at(b)], -1, change_);
    shift(b, node_of_[at(a)], -1, change_);
    for (const auto& [k, amount] : change_) delta_[k] += amount;
    double price = 0;
    for (const auto& [k, _] : change_) {
      if (delta_[k] == 0) continue;
      price += excess(traffic_[k] + delta_[k]) - excess(traffic_[k]);
      delta_[k] = 0;
    }
    return price;
  }

  void swap(i64 a, i64 b) {
    change_.clear();
    i64 &p = node_of_[at(a)], &q = node_of_[at(b)];
    shift(a, p, 1, change_);
    shift(b, q, 1, change_);
    shift(a, q, -1, change_);
    shift(b, p, -1, change_);
    for (const auto& [k, amount] : change_) traffic_[k] += amount;
    std::replace(members_[at(p)].begin(), members_[at(p)].end(), a, b);
    std::replace(members_[at(q)].begin(), members_[at(q)].end(), b, a);
    std::swap(p, q);
  }

  // A few swaps at random, to get away from what the search returns to.
  void kick() {
    for (int k = 0; k < 4; ++k) {
      const i64 a = draw(), b = draw();
      if (node_of_[at(a)] != node_of_[at(b)]) swap(a, b);
    }
  }
  i64 draw() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<i64>((random_ >> 33) % d_);
  }

  // One swap for the busiest rank. False if there is none to make.
  bool relieve(i64 step, std::vector<i64>& rests) {
    delta_.resize(traffic_.size());
    const std::size_t busiest =
        at(std::max_element(traffic_.begin(), traffic_.end()) - traffic_.begin());
    double best_price = std::numeric_limits<double>::infinity();
    i64 best_a = -1, best_b = -1;
    const auto offer = [&](i64 a, i64 b) {
      if (rests[at(a)] >= step || rests[at(b)] >= step) return;
      const double p = price(a, b);
      if (p < best_price) best_price = p, best_a = a, best_b = b;
    };
    const i64 home = node(static_cast<i64>(busiest));
    for (std::size_t e = source_start_[busiest]; e < source_start_[busiest + 1]; ++e) {
      const i64 b = by_source_[e].other;
      if (node_of_[at(b)] == home) continue;
      for (const i64 a : members_[at(home)]) offer(a, b);
    }
    if (best_a < 0) return false;
    swap(best_a, best_b);
    rests[at(best_a)] = rests[at(best_b)] = step + std::min(3 + step % 7, t_.num_ranks / 4);
    return true;
  }

  Transfers t_;
  std::size_t d_;
  std::vector<Entry> by_source_, by_batch_;
  std::vector<std::size_t> source_start_, batch_start_;
  std::vector<i64> node_of_, traffic_, delta_;
  std::vector<std::vector<i64>> members_;  // batches of each node
  std::vector<std::pair<std::size_t, i64>> change_;
  i64 goal_ = 0;
  u64 random_ = 0;
};

}  // namespace orchmllm
