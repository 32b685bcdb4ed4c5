// Stages 2 and 3 of `least_move`: ranks above the cap hand their surplus to ranks below it, first inside
// each node, then (what is left) to ranks of any node.
#pragma once

#include "deal.hpp"
#include "placement.hpp"
#include "trade.hpp"

namespace orchmllm {

class EvenRanks {
 public:
  EvenRanks(Placement& placement, const std::vector<i32>& ascending)
      : s_(placement), p_(placement.problem), half_(s_.budget.left / 2), deal_(p_.unit),
        lists_(at(p_.num_ranks)) {
    std::vector<std::size_t> count(lists_.size(), 8);  // a few more than there are: some arrive
    for (std::size_t i = 0; i < p_.weight.size; ++i) ++count[at(s_.rank_of[i])];
    for (std::size_t r = 0; r < lists_.size(); ++r) lists_[r].reserve(count[r]);
    for (const i32 id : ascending) {
      const i64 weight = p_.weight[at(id)];
      if (weight == 0) continue;
      if (lightest_ == 0) lightest_ = weight;
      lists_[at(s_.rank_of[id])].push_back({weight, id});
    }
    bool done = true;
    for (i64 node = 0; node < s_.num_nodes; ++node) {
      if (p_.exact) settle_heavy(s_.first_rank(node), s_.end_rank(node));
      done = even(s_.first_rank(node), s_.end_rank(node)) && done;
    }
    s_.receive_limit = std::numeric_limits<i64>::max();  // a fuller rank costs more than a receive
    walks_ = p_.walks;
    if (!done) even(0, p_.num_ranks);
  }

 private:
  using Load = std::pair<i64, i64>;  // (load, rank)

  // The searches of a higher level are dearer and only used when the lower ones find nothing. kFar
  // is quick, but moves most between nodes: last while there is time, early once half is spent.
  enum Level { kGive, kUneven, kDeal, kDouble, kHalf, kAnything, kFar, kLevels };
  static constexpr Level kThorough[] = {kGive, kUneven, kDeal, kDouble, kHalf, kAnything, kFar};
  static constexpr Level kHurried[] = {kGive, kUneven, kDeal, kFar, kDouble, kHalf, kAnything};

  // With a heavy item a rank has room for at most one other, and wastes what is left beside that. At
  // tolerance 0 such ranks are settled first, as the lower bound assumes: in ascending order of the
  // room beside the heavy item, each gets the heaviest that fits and passes the rest on.
  void settle_heavy(i64 begin, i64 end) {
    std::vector<Load> heavy;  // (room beside the heaviest item, rank)
    std::vector<i64> others;
    bool full = false;
    for (i64 r = begin; r < end; ++r) {
      const List& list = lists_[at(r)];
      full = full || s_.load[at(r)] > p_.cap;
      const i64 room = p_.cap - s_.base(r) - (list.empty() ? 0 : list.back().weight);
      if (!list.empty() && room - lightest_ < lightest_) {
        heavy.emplace_back(room, r);
      } else {
        others.push_back(r);
      }
    }
    if (!full || others.empty()) return;
    std::sort(heavy.begin(), heavy.end());
    for (const auto& [room, rank] : heavy) {
      if (s_.budget.spend(others.size())) settle(rank, room, others);
    }
  }

  // Skipped where the emptiest rank cannot take what is passed on without becoming the fullest.
  void settle(i64 rank, i64 room, const std::vector<i64>& others) {
    const Item heaviest = remove_at(lists_[at(rank)], lists_[at(rank)].size() - 1);
    i64 owner = rank, target = others.front();
    i64 beside = heaviest_fitting(rank, room);
    for (const i64 r : others) {
      if (s_.load[at(r)] < s_.load[at(target)]) target = r;
      const i64 weight = heaviest_fitting(r, room);
      if (weight > beside) beside = weight, owner = r;
    }
    const i64 rest =
        s_.load[at(rank)] - s_.base(rank) - heaviest.weight - (owner == rank ? beside : 0);
    if (s_.load[at(target)] + rest <= std::max(p_.cap, s_.load[at(rank)])) {
      moved_.clear();
      if (beside > 0) moved_.push_back(remove_at(lists_[at(owner)], fitting(owner, room) - 1));
      for (const Item& item : lists_[at(rank)]) put(item, target);
      lists_[at(rank)].clear();
      for (const Item& item : moved_) put(item, rank);
    }
    put(heaviest, rank);
  }

  // Number of items of a rank, the lightest first, that fit alone.
  std::size_t fitting(i64 rank, i64 room) const {
    return first_at_least(lists_[at(rank)], room + 1);
  }

  i64 heaviest_fitting(i64 rank, i64 room) const {
    const std::size_t count = fitting(rank, room);
    return count > 0 ? lists_[at(rank)][count - 1].weight : 0;
  }

  // Ranks [begin, end) trade until none is above the cap: the fullest with one of the emptiest.
  // Returns false when nothing helps any more. Every step lowers the sum of what is above the cap.
  bool even(i64 begin, i64 end) {
    i128 slack = 0;
    ranked_.clear();
    for (i64 r = begin; r < end; ++r) {
      ranked_.emplace_back(s_.load[at(r)], r);
      slack += p_.cap - s_.load[at(r)];
    }
    std::sort(ranked_.begin(), ranked_.end());
    // What a rank that is filled up may stay short of the cap.
    waste_ = static_cast<i64>(std::max<i128>(0, slack / (2 * (end - begin))));
    while (ranked_.back().first > p_.cap) {
      bool progress = false;
      const int levels = s_.budget.left >= 0 ? kLevels : kGive + 1;
      const Level* order = s_.budget.left < half_ ? kHurried : kThorough;
      for (int k = 0; k < levels && !progress; ++k) progress = step(order[k]);
      if (!progress && !(walks_-- > 0 && walk())) return false;
    }
    return true;
  }

  // The fullest rank swaps some of what it has above the cap with a rank of its node that is at the
  // cap: that one's items may suit the ranks with room. The ranks of the node take turns.
  bool walk() {
    const auto [load_a, a] = ranked_.back();
    const i64 first = a - a % p_.ranks_per_node;
    const i64 width = std::min(p_.ranks_per_node, p_.num_ranks - first);
    const Window window{1, load_a - p_.cap};
    const AnyItem any;
    for (i64 k = 0; k < width; ++k) {
      const i64 b = first + turn_++ % width;
      Trade trade;
      if (b == a || s_.load[at(b)] > p_.cap ||
          !find_swap(lists_[at(a)], lists_[at(b)], window, any, any, s_.budget, trade)) {
        continue;
      }
      const Load was_a{s_.load[at(a)], a}, was_b{s_.load[at(b)], b};
      apply(trade, a, b);
      replace(was_a);
      replace(was_b);
      return true;
    }
    // Nothing to swap: beside a heavy item there may be no room for any other. It can be passed on
    // to a rank with many that does not become the fullest.
    const std::size_t light = first_at_least(lists_[at(a)], window.high);
    for (i64 k = 0; k < width && light < lists_[at(a)].size(); ++k) {
      const i64 b = first + turn_++ % width;
      if (lists_[at(b)].size() <= 2 * lists_[at(a)].size() ||
          s_.load[at(b)] + lists_[at(a)][light].weight >= load_a) {
        continue;
      }
      const Load was_a{s_.load[at(a)], a}, was_b{s_.load[at(b)], b};
      put(remove_at(lists_[at(a)], light), b);
      replace(was_a);
      replace(was_b);
      return true;
    }
    return false;
  }

  void replace(const Load& was) {
    ranked_.erase(std::lower_bound(ranked_.begin(), ranked_.end(), was));
    const Load entry{s_.load[at(was.second)], was.second};
    ranked_.insert(std::upper_bound(ranked_.begin(), ranked_.end(), entry), entry);
  }

  // A rank with one item and no room for the lightest is no partner; with two, only for a swap.
  bool step(Level level) {
    const std::size_t few = level == kDeal || level == kDouble || level == kFar ? 2 : 1;
    std::size_t partners = level == kUneven ? 8 : level == kDeal || level == kDouble || level == kFar
                               ? 3 : 16;
    const auto [load_a, a] = ranked_.back();
    for (std::size_t k = 0; partners > 0 && k + 1 < ranked_.size() && ranked_[k].first < p_.cap;
         ++k) {
      const i64 b = ranked_[k].second;
      if (lists_[at(b)].size() <= few && p_.cap - ranked_[k].first < lightest_) continue;
      --partners;
      if (!relieve(a, b, level)) continue;
      ranked_.pop_back();
      ranked_.erase(ranked_.begin() + static_cast<std::ptrdiff_t>(k));
      for (const i64 rank : {a, b}) {
        const Load entry{s_.load[at(rank)], rank};
        ranked_.insert(std::upper_bound(ranked_.begin(), ranked_.end(), entry), entry);
      }
      return true;
    }
    return false;
  }

  // Moves load from rank a (above the cap) to rank b (below it). True if anything moved.
  bool relieve(i64 a, i64 b, Level level) {
    List &from = lists_[at(a)], &to = lists_[at(b)];
    const i64 need = s_.load[at(a)] - p_.cap, room = p_.cap - s_.load[at(b)];
    Window window{need <= room ? need : std::max<i64>(1, room - waste_), room};
    bool progress = false;
    if (level == kGive) {
      moved_.clear();
      ReceiveRule rule{s_, b};
      Picker picker{from, window, s_.budget, moved_};
      picker.take_sum(s_.typical, rule);
      window = picker.window;
      progress = !moved_.empty();
      for (const Item& item : moved_) put(item, b);
      if (window.low <= 0) return true;
    } else if (level == kDeal || level == kFar) {
      return s_.apart(a, b) == (level == kFar) && (level == kDeal || p_.exact) &&
             deal(a, b, window);
    } else if (level >= kHalf) {
      window.low = level == kHalf ? (std::min(need, room) + 1) / 2 : 1;
    }
    const ReceiveRule out{s_, b}, back{s_, a};
    Trade trade;
    if ((level == kGive && find_swap(from, to, window, out, back, s_.budget, trade)) ||
        (level == kUneven && find_uneven_swap(from, to, window, out, back, s_.budget, trade)) ||
        (level == kDouble && find_double_swap(from, to, window, out, back, s_.budget, trade)) ||
        (level >= kHalf && (find_swap(from, to, window, out, back, s_.budget, trade) ||
                            find_uneven_swap(from, to, window, out, back, s_.budget, trade)))) {
      apply(trade, a, b);
      return true;
    }
    return level >= kHalf ? bulk_swap(a, b, window) : progress;
  }

  // Rank a keeps what it has less a sum inside the window. Between nodes that would be a lot of
  // traffic, inside a node it costs little. A few items of both have so many sums that the rest,
  // which cost ten times as much to list, are rarely needed.
  bool deal(i64 a, i64 b, Window window) {
    constexpr std::size_t kSome = 16;
    const std::size_t all = std::max(lists_[at(a)].size(), lists_[at(b)].size());
    return (all > kSome && deal(a, b, window, kSome)) || deal(a, b, window, all);
  }

  // With `most` items of each rank, from the lightest to the heaviest.
  bool deal(i64 a, i64 b, Window window, std::size_t most) {
    moved_.clear();
    i64 held = 0;
    for (const i64 rank : {a, b}) {
      const List& list = lists_[at(rank)];
      const std::size_t count = std::min(most, list.size());
      for (std::size_t k = 0; k < count; ++k) moved_.push_back(list[k * list.size() / count]);
      for (std::size_t k = 0; rank == a && k < count; ++k) held += moved_[k].weight;
    }
    if (!deal_.find(moved_, {held - window.high, held - window.low}, s_.budget, chosen_)) {
      return false;
    }
    for (const i64 rank : {a, b}) {
      List& list = lists_[at(rank)];
      const std::size_t size = list.size(), count = std::min(most, size);
      for (std::size_t k = count; k-- > 0;) remove_at(list, k * size / count);
    }
    for (std::size_t k = 0; k < moved_.size(); ++k) put(moved_[k], chosen_[k] ? a : b);
    return true;
  }

  bool bulk_swap(i64 a, i64 b, Window window) {
    moved_.clear();
    const ReceiveRule rule{s_, a};
    const std::size_t heavy = find_bulk_swap(lists_[at(a)], lists_[at(b)], window, s_.typical, rule,
                                             s_.budget, moved_);
    if (heavy == kNone) return false;
    const Item item = remove_at(lists_[at(a)], heavy);
    for (const Item& back : moved_) put(back, a);
    put(item, b);
    return true;
  }

  void apply(const Trade& trade, i64 a, i64 b) {
    List &from = lists_[at(a)], &to = lists_[at(b)];
    List out, back;
    for (int k = 1; k >= 0; --k) {  // the higher index first: the lower one stays valid
      if (trade.out[k] != kNone) out.push_back(remove_at(from, trade.out[k]));
      if (trade.back[k] != kNone) back.push_back(remove_at(to, trade.back[k]));
    }
    for (const Item& item : out) put(item, b);
    for (const Item& item : back) put(item, a);
  }

  void put(const Item& item, i64 rank) {
    s_.move(item, rank);
    insert_sorted(lists_[at(rank)], item);
  }

  Placement& s_;
  const LocalProblem& p_;
  i64 half_, lightest_ = 0, waste_ = 0, walks_ = 0, turn_ = 0;
  Deal deal_;
  std::vector<char> chosen_;
  std::vector<List> lists_;
  std::vector<Load> ranked_;  // ascending
  List moved_;
};

}  // namespace orchmllm
