// Units of ranks (single ranks, or nodes) above their cap trade with units below it.
#pragma once

#include <set>

#include "trade.hpp"

namespace orchmllm {

inline std::vector<i64> range(i64 begin, i64 end) {
  std::vector<i64> units(at(end - begin));
  std::iota(units.begin(), units.end(), begin);
  return units;
}

class Trading {
 public:
  // One item each way, bundles of two, one heavy against several, bundles of any number; with no
  // exact end, what fits.
  enum How { kSingle, kPairs, kHeavy, kBundles, kWhatFits };

  // width: ranks of a unit. cap: of the load of a rank, in a unit's mean. takes_part(id): whether
  // an item does.
  template <class Filter>
  Trading(Placement& placement, const std::vector<i32>& ascending, i64 width, i64 cap,
          const Filter& takes_part)
      : s_(placement),
        width_(width),
        cap_(cap),
        load_(at((s_.problem.num_ranks + width - 1) / width)),
        first_pass_(load_.size(), width > 1 ? 0 : 2),
        lists_(load_.size()) {
    const View<i64>& weight = s_.problem.weight;
    const std::size_t mean = weight.size / lists_.size();
    for (List& list : lists_) list.reserve(mean + mean / 4 + 4);
    for (const i32 id : ascending) {
      const i64 w = weight[at(id)];
      if (w > 0 && takes_part(id)) lists_[at(s_.rank_of[id] / width_)].push_back({w, id});
    }
    for (i64 r = 0; r < s_.problem.num_ranks; ++r) load_[at(r / width_)] += s_.load[at(r)];
  }

  // The units trade until none is above its cap, the one furthest above first; one that nothing
  // helps is passed over, or is the end with `at_once`. False if there was one. Every trade lowers
  // the sum of what is above the caps.
  bool even(const std::vector<i64>& units, How first_how = kSingle, bool at_once = false) {
    if (!s_.budget.spend(64 * units.size())) return false;
    std::set<Excess> ranked;
    i128 slack = 0;
    for (const i64 u : units) {
      ranked.emplace(excess(u), u);
      slack -= excess(u);
    }
    // What a unit that is filled up may stay short of its cap.
    waste_ = static_cast<i64>(std::max<i128>(0, slack / (2 * static_cast<i64>(units.size()))));
    bool helped = true;
    while (!ranked.empty() && ranked.rbegin()->first > 0) {
      if (!s_.budget.spend(64)) return false;
      const auto fullest = std::prev(ranked.end());
      const i64 a = fullest->second, b = relieve(a, ranked, first_how);
      ranked.erase(fullest);
      if (b == kNobody) {
        if (at_once) return false;
        helped = false;
        continue;
      }
      ranked.emplace(excess(a), a);
      ranked.emplace(excess(b), b);
    }
    return helped;
  }

  // So much room of the unit stays free: it counts as load.
  void keep_free(i64 unit, i64 room) { load_[at(unit)] += room; }

 private:
  using Excess = std::pair<i64, i64>;  // (load above the cap, unit)
  static constexpr i64 kNobody = -1;
  static constexpr int kPartners = 24;

  i64 excess(i64 unit) const {
    const i64 first = unit * width_, end = std::min(first + width_, s_.problem.num_ranks);
    const i128 room = static_cast<i128>(cap_) * (end - first) - load_[at(unit)];
    return -static_cast<i64>(std::min<i128>(room, s_.total));  // more room than that is no use
  }

  // Moves load from unit a (above its cap) to one that has room, which is taken out of `ranked` and
  // returned; kNobody if nothing helps. Tried are some units from the emptiest to those with just
  // enough room, or the emptiest where none has that.
  i64 relieve(i64 a, std::set<Excess>& ranked, How first_how) {
    const i64 emptiest = ranked.begin()->first, need = excess(a);
    const i64 step = std::max<i64>(0, -need - emptiest) / kPartners;
    for (int k = first_how; k <= std::max<int>(first_how, kBundles); ++k) {
      const How how = static_cast<How>(k);
      if (!can_begin(a, how)) return kNobody;
      auto it = ranked.begin();
      for (int tried = 0; tried < kPartners && it != ranked.end() && it->first < 0; ++tried) {
        const i64 b = it->second;
        if (relieve(a, b, need, -it->first, how)) {
          ranked.erase(it);
          return b;
        }
        it = ranked.upper_bound({it->first + step, b});
      }
    }
    return kNobody;
  }

  static int most_items(How how) { return how == kPairs ? 2 : std::numeric_limits<int>::max(); }

  bool can_begin(i64 a, How how) {
    if (s_.budget.left < 0) return false;
    return (how != kPairs && how != kBundles) ||
           trade_.make_bundles(lists_[at(a)], most_items(how), s_.budget);
  }

  bool relieve(i64 a, i64 b, i64 need, i64 room, How how) {
    if (!s_.budget.spend(16)) return false;
    const i64 amount = std::min(need, room);
    if (how == kWhatFits) return give(a, b, amount, 0);
    if (how == kSingle && amount > s_.typical) return give(a, b, amount, s_.typical);
    if (how == kSingle && width_ > 1 && room < need / 4) return false;  // moves much for little
    const Window window{need <= room ? need : std::max<i64>(1, room - waste_), room};
    const Window half{1 + amount / 2, room};  // with no exact end, what takes half of it off
    const auto allows = [&] {
      return width_ > 1 ? s_.may_send(all(trade_.out)) && s_.may_send(all(trade_.back))
                        : s_.may_receive(b, all(trade_.out)) && s_.may_receive(a, all(trade_.back));
    };
    const List &from = lists_[at(a)], &to = lists_[at(b)];
    const bool found =
        how == kSingle  ? trade_.find_single(from, to, window, allows, s_.budget)
        : how == kHeavy ? trade_.find_heavy(from, to, half, s_.budget)
                        : trade_.find_bundles(from, to, most_items(how), window, half, allows,
                                              s_.budget);
    if (!found) return false;
    for (const Item& item : trade_.out) move(item, b);
    for (const Item& item : trade_.back) move(item, a);
    pass_on(trade_.out, a, b);
    pass_on(trade_.back, b, a);
    return true;
  }

  // Items of unit a to unit b until less than `enough` is missing of `amount` (with 0: one item),
  // the heaviest that fit first. From nodes, what full ranks may send comes first.
  // False if there is none.
  bool give(i64 a, i64 b, i64 amount, i64 enough) {
    const List& from = lists_[at(a)];
    given_.clear();
    for (int pass = first_pass_[at(a)]; pass < 3; ++pass) {
      const std::size_t before = given_.size();
      std::size_t k = from.size();
      for (; k > 0 && amount > enough; --k) {
        const Item& item = from[k - 1];
        if (item.weight > amount || s_.rank_of[item.id] / width_ != a) continue;
        if (width_ == 1 && !s_.may_receive(b, {&item, 1})) continue;
        if (pass < 2 && !s_.may_send({&item, 1})) continue;
        if (pass < 1 && s_.load[at(s_.rank_of[item.id])] - item.weight < cap_ - s_.typical) continue;
        move(item, b);
        given_.push_back(item);
        amount -= item.weight;
        if (enough == 0) amount = 0;
      }
      s_.budget.spend(4 * (from.size() - k));
      // Where all that may go is gone, the list is not searched for it again.
      if (given_.size() == before && pass == first_pass_[at(a)] && enough > 0 && pass < 2) {
        ++first_pass_[at(a)];
      }
    }
    if (given_.empty()) return false;
    std::sort(given_.begin(), given_.end(), lighter);
    pass_on(given_, a, b);
    return true;
  }

  // To the rank of the unit that has most room.
  void move(const Item& item, i64 unit) {
    load_[at(s_.rank_of[item.id] / width_)] -= item.weight;
    load_[at(unit)] += item.weight;
    const i64 first = unit * width_, end = std::min(first + width_, s_.problem.num_ranks);
    s_.move(item, width_ == 1 ? unit : s_.roomiest(first, end, item));
  }

  // Moves `items` (ascending) from the list of unit a to that of unit b.
  void pass_on(const List& items, i64 a, i64 b) {
    List &from = lists_[at(a)], &to = lists_[at(b)];
    if (items.size() <= 2) {
      s_.budget.spend((from.size() + to.size()) / 8);  // memory is moved many items at a time
      for (const Item& item : items) {
        from.erase(std::lower_bound(from.begin(), from.end(), item, lighter));
        to.insert(std::lower_bound(to.begin(), to.end(), item, lighter), item);
      }
      return;
    }
    const auto first = std::lower_bound(from.begin(), from.end(), items[0], lighter);
    s_.budget.spend(static_cast<std::size_t>(from.end() - first) + to.size());
    from.erase(std::remove_if(first, from.end(), [&](const Item& item) {
                 return s_.rank_of[item.id] / width_ != a;
               }), from.end());
    const auto middle = static_cast<std::ptrdiff_t>(to.size());
    to.insert(to.end(), items.begin(), items.end());
    std::inplace_merge(to.begin(), to.begin() + middle, to.end(), lighter);
  }

  static View<Item> all(const List& list) { return {list.data(), list.size()}; }

  Placement& s_;
  i64 width_, cap_, waste_ = 0;
  Trade trade_;
  std::vector<i64> load_;  // per unit
  std::vector<int> first_pass_;  // of give()
  std::vector<List> lists_;
  List given_;
};

}  // namespace orchmllm
