// Stage 1 of `least_move`: nodes above their target give away just their surplus.
//
// Surpluses and rooms are matched in descending order (at most num_nodes - 1 transfers), each
// transfer is a set of items of the giving node, taken from its fullest ranks, with a sum as near
// to what is needed as half of the free room in the system allows.
#pragma once

#include "placement.hpp"

namespace orchmllm {

class EvenNodes {
 public:
  EvenNodes(Placement& placement, const std::vector<i32>& ascending)
      : s_(placement), p_(placement.problem) {
    measure();
    if (over_.empty() || under_.empty()) return;
    list_items(ascending);
    std::size_t to = 0;
    for (std::size_t from = 0; from < over_.size(); ++from) {
      while (over_[from].amount > 0 && to < under_.size()) {
        if (!transfer(from, under_[to])) ++to;
      }
    }
  }

 private:
  struct Side {
    i64 amount, node;
    bool operator<(const Side& other) const {
      return amount != other.amount ? amount > other.amount : node < other.node;
    }
  };

  // Items a node may give away: of ranks that have sent less than the limit, and if wanted only of
  // ranks that stay about full without them (what they give saves a move inside the node).
  struct SendRule {
    Placement& s;
    i64 limit;
    bool only_full;
    bool admits(const Item& item) const {
      const i64 rank = s.home_of(item);
      return item.weight <= limit - s.sent[at(rank)] &&
             (!only_full || s.load[at(rank)] - item.weight >= s.problem.cap - s.typical);
    }
    bool admits_both(const Item& a, const Item& b) const {
      const i64 rank = s.home_of(a);
      return rank != s.home_of(b) || a.weight + b.weight <= limit - s.sent[at(rank)];
    }
    void take(const Item& item) {
      s.sent[at(s.home_of(item))] += item.weight;
      s.load[at(s.home_of(item))] -= item.weight;
    }
  };

  // Surplus or room of each node against a target that leaves every rank some free room (half of
  // what there is, at most an eighth of an item), without which the ranks of a node could not be
  // evened out.
  void measure() {
    const i128 slack = static_cast<i128>(p_.cap) * p_.num_ranks - s_.total;
    if (slack < 0) return;
    reserve_ = static_cast<i64>(
        std::min<i128>(slack / (p_.tight ? 1 : 2) / p_.num_ranks, s_.typical / 8));
    i64 surplus_limit = 0, room_limit = 0;
    i128 spare = 0;
    for (i64 node = 0; node < s_.num_nodes; ++node) {
      i128 surplus = -static_cast<i128>(p_.cap - reserve_) * s_.width(node);
      i64 fullest = 0;
      for (i64 r = s_.first_rank(node); r < s_.end_rank(node); ++r) {
        surplus += s_.load[at(r)];
        fullest = std::max(fullest, s_.load[at(r)]);
      }
      if (surplus > 0 && fullest <= p_.cap) surplus = 0;  // nothing to even out: no room needed
      spare -= surplus;
      const i64 amount = static_cast<i64>(
          std::min<i128>(s_.total, surplus < 0 ? -surplus : surplus));
      if (surplus > 0) over_.push_back({amount, node});
      if (surplus < 0) under_.push_back({amount, node});
      i64& limit = surplus > 0 ? surplus_limit : room_limit;
      limit = std::max(limit, (amount + s_.width(node) - 1) / s_.width(node));
    }
    std::sort(over_.begin(), over_.end());
    std::sort(under_.begin(), under_.end());
    if (!over_.empty() && !under_.empty() && spare > 0) {
      spare -= level_rooms(over_.front().amount, spare / 2);
      const i64 width = s_.width(under_.front().node);
      room_limit = std::min(room_limit, (under_.front().amount + width - 1) / width);
    }
    s_.send_limit = surplus_limit + surplus_limit / 16;
    // Ranks need not receive more than the largest surplus just because one node is nearly empty.
    const i64 most = std::max(surplus_limit, std::min(room_limit, 2 * surplus_limit));
    s_.receive_limit = most + most / 16;
    if (!under_.empty()) {
      waste_ = static_cast<i64>(std::min<i128>(
          s_.total, std::max<i128>(0, spare) / 2 / static_cast<i128>(under_.size())));
    }
  }

  // Not all room has to be filled: lowers the largest to one level, but not below the largest
  // surplus, by at most `most` in all. Returns by how much.
  i128 level_rooms(i64 lowest, i128 most) {
    i128 left = most;
    i64 level = under_.front().amount;
    std::size_t same = 0;  // rooms at or above the level
    while (level > lowest && left > 0) {
      while (same < under_.size() && under_[same].amount >= level) ++same;
      const i64 next = same < under_.size() ? std::max(lowest, under_[same].amount) : lowest;
      const i64 drop = static_cast<i64>(
          std::min<i128>(level - next, left / static_cast<i128>(same)));
      if (drop == 0) break;
      level -= drop;
      left -= static_cast<i128>(drop) * static_cast<i128>(same);
    }
    for (std::size_t k = 0; k < same; ++k) under_[k].amount = std::min(under_[k].amount, level);
    return most - left;
  }

  // Sorted items of each giving node: those cheap to move, and the rest.
  void list_items(const std::vector<i32>& ascending) {
    std::vector<i64> list_of(at(s_.num_nodes), -1);
    for (std::size_t k = 0; k < over_.size(); ++k) {
      list_of[at(over_[k].node)] = static_cast<i64>(k);
    }
    cheap_.resize(over_.size());
    rest_.resize(over_.size());
    const std::size_t mean = p_.weight.size / at(s_.num_nodes);
    for (List& list : cheap_) list.reserve(mean + mean / 2 + 8);
    for (const i32 id : ascending) {
      const i64 weight = p_.weight[at(id)];
      const i64 k = list_of[at(p_.home[at(id)] / p_.ranks_per_node)];
      if (k >= 0 && weight > 0) cheap_[at(k)].push_back({weight, id});
    }
    if (p_.move_cost.size == 0) return;
    for (std::size_t k = 0; k < over_.size(); ++k) split(over_[k].amount, cheap_[k], rest_[k]);
  }

  // Keeps in `cheap` the items of least cost per weight that hold the surplus and a bit more.
  void split(i64 surplus, List& cheap, List& rest) {
    std::vector<std::pair<double, std::size_t>> rate(cheap.size());
    for (std::size_t i = 0; i < cheap.size(); ++i) {
      rate[i] = {static_cast<double>(p_.move_cost[at(cheap[i].id)]) /
                     static_cast<double>(cheap[i].weight), i};
    }
    // A heap: only the cheapest few per cent are ever looked at.
    std::make_heap(rate.begin(), rate.end(), std::greater<>());
    std::vector<char> keep(cheap.size());
    i64 held = -surplus / 4;
    for (auto end = rate.end(); end != rate.begin() && held < surplus; --end) {
      std::pop_heap(rate.begin(), end, std::greater<>());
      const std::size_t i = (end - 1)->second;
      keep[i] = 1;
      held += cheap[i].weight;
    }
    List kept;
    for (std::size_t i = 0; i < cheap.size(); ++i) (keep[i] ? kept : rest).push_back(cheap[i]);
    cheap.swap(kept);
  }

  // Moves items between two nodes; false when the target takes no more.
  bool transfer(std::size_t from, Side& target) {
    Side& source = over_[from];
    const i64 give = s_.width(source.node) * reserve_ / 4;
    const i64 extra = s_.width(target.node) * reserve_ / 4;
    const bool finishes = source.amount <= target.amount;
    const i64 low = finishes ? source.amount - give : target.amount - waste_;
    moved_.clear();
    const Window left = pick({low, target.amount + extra}, cheap_[from], rest_[from]);
    receive(target.node);
    const i64 amount = low - left.low;
    source.amount = finishes && left.low <= 0 ? 0 : source.amount - amount;
    target.amount -= amount;
    return finishes && target.amount > 0 && left.low <= 0;
  }

  // Preference: full ranks, then an even spread over all ranks, then an exact end; only when all
  // that fails, dearer items and more than an even share of one rank.
  Window pick(Window window, List& cheap, List& rest) {
    SendRule full{s_, s_.send_limit, true}, even{s_, s_.send_limit, false};
    SendRule relaxed{s_, s_.send_limit + s_.send_limit / 16, false};
    SendRule stretched{s_, s_.send_limit + s_.send_limit / 8, false};
    SendRule any{s_, std::numeric_limits<i64>::max(), false};
    Picker picker{cheap, window, s_.budget, moved_};
    picker.take_bulk(s_.typical, full);
    if (picker.done() || picker.take_exact(full)) return picker.window;
    picker.take_bulk(s_.typical, even);
    if (picker.done() || picker.take_exact(even) || picker.take_exact(relaxed)) {
      return picker.window;
    }
    const struct {
      List& items;
      SendRule& rule;
    } tries[] = {{cheap, even}, {rest, even}, {cheap, stretched}, {cheap, any}, {rest, any}};
    window = picker.window;
    for (const auto& next : tries) {
      Picker summed{next.items, window, s_.budget, moved_};
      summed.take_sum(s_.typical, next.rule);
      window = summed.window;
      if (summed.done()) break;
    }
    return window;
  }

  // Puts the moved items, heaviest first, on the least-loaded ranks of a node that may still
  // receive them; when none may, on the one that has received least.
  void receive(i64 node) {
    std::sort(moved_.begin(), moved_.end(), lighter);
    for (auto item = moved_.rbegin(); item != moved_.rend(); ++item) {
      const auto key = [&](i64 rank) {
        const i64 received = s_.received[at(rank)];
        const bool full = item->weight > s_.receive_limit - received;
        return std::pair<bool, i64>(full, full ? received : s_.load[at(rank)]);
      };
      i64 best = s_.first_rank(node);
      for (i64 r = best + 1; r < s_.end_rank(node); ++r) {
        if (key(r) < key(best)) best = r;
      }
      s_.load[at(s_.home_of(*item))] += item->weight;  // `take` has taken it off already
      s_.move(*item, best);
    }
  }

  Placement& s_;
  const LocalProblem& p_;
  i64 reserve_ = 0, waste_ = 0;
  std::vector<Side> over_, under_;
  std::vector<List> cheap_, rest_;
  List moved_;
};

}  // namespace orchmllm
