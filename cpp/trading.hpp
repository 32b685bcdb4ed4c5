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
  // One item each way, bundles of two, with no exact end what fits, one heavy against several.
  enum How { kSingle, kBundles, kWhatFits, kHeavy };

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
  // helps is passed over. False if there was one. Every trade lowers the sum of what is above the
  // caps.
  bool even(const std::vector<i64>& units, How first_how = kSingle) {
    if (!s_.budget.spend(64 * units.size())) return false;
    std::set<Excess> ranked;
    i128 slack = 0;
    for (const i64 u : units) {
      ranked.emplace(excess(u), u);
      slack -= excess(u);
    }
    // What a unit that is filled up may stay short of its cap.
    waste_ = static_cast<i64>(std::max<i128>(0, slack / (2 * static_cast<i64>(units.size()))));
    std::size_t helpless = 0;
    while (!ranked.empty() && ranked.rbegin()->first > 0) {
      if (!s_.budget.spend(64) || 8 * helpless > units.size() + 128) return false;
      const auto fullest = std::prev(ranked.end());
      const i64 a = fullest->second, b = relieve(a, ranked, first_how);
      ranked.erase(fullest);
      if (b == kNobody) {
        ++helpless;
        continue;
      }
      ranked.emplace(excess(a), a);
      ranked.emplace(excess(b), b);
    }
    return helpless == 0;
  }

  // For a few ranks that nothing helped: each is dealt anew together with some of the emptiest, and
  // then all trade again. False if one stays above the cap.
  bool deal() {
    const std::vector<i64> units = range(0, static_cast<i64>(load_.size()));
    for (int round = 0; round < kRounds && s_.budget.spend(64 * units.size()); ++round) {
      std::set<Excess> ranked;
      for (const i64 u : units) ranked.emplace(excess(u), u);
      const auto full = std::distance(ranked.upper_bound({0, kAll}), ranked.end());
      if (8 * full > static_cast<i64>(units.size()) + 64) return false;
      if (deal(ranked, std::size_t{4} << round % 4) || even(units)) return true;
    }
    return false;
  }

 private:
  using Excess = std::pair<i64, i64>;  // (load above the cap, unit)
  static constexpr i64 kNobody = -1;
  static constexpr i64 kAll = std::numeric_limits<i64>::max();
  static constexpr int kPartners = 16, kRounds = 12, kDeals = 10;

  i64 excess(i64 unit) const {
    const i64 first = unit * width_, end = std::min(first + width_, s_.problem.num_ranks);
    const i128 room = static_cast<i128>(cap_) * (end - first) - load_[at(unit)];
    return -static_cast<i64>(std::min<i128>(room, s_.total));  // more room than that is no use
  }

  // Moves load from unit a (above its cap) to one of the emptiest, which is taken out of `ranked`
  // and returned; kNobody if nothing helps.
  i64 relieve(i64 a, std::set<Excess>& ranked, How first_how) {
    for (int k = first_how; k <= (first_how == kWhatFits ? kWhatFits : kHeavy); ++k) {
      const How how = static_cast<How>(k);
      if (how == kBundles && !trade_.list_bundles(lists_[at(a)], s_.budget)) return kNobody;
      if (s_.budget.left < 0) return kNobody;
      int partners = kPartners;
      for (auto it = ranked.begin(); it->first < 0 && partners > 0; ++it, --partners) {
        const i64 b = it->second;
        if (!relieve(a, b, excess(a), -it->first, how)) continue;
        ranked.erase(it);
        return b;
      }
    }
    return kNobody;
  }

  bool deal(std::set<Excess>& ranked, std::size_t partners) {
    bool done = true;
    while (!ranked.empty() && ranked.rbegin()->first > 0) {
      std::vector<i64> group{ranked.rbegin()->second};
      i128 over = ranked.rbegin()->first;
      ranked.erase(std::prev(ranked.end()));
      while (group.size() <= partners && !ranked.empty() && ranked.begin()->first < 0) {
        over += ranked.begin()->first;
        group.push_back(ranked.begin()->second);
        ranked.erase(ranked.begin());
      }
      if (s_.budget.left < 0) return false;
      if (over > 0 || !deal(group)) {
        done = false;  // and none of them is tried again
        continue;
      }
      for (const i64 u : group) ranked.emplace(excess(u), u);
    }
    return done;
  }

  // All items of the ranks, in random orders to the least loaded, until trading them from there ends
  // with none above its cap. If none of the orders does, nothing is changed.
  bool deal(const std::vector<i64>& ranks) {
    List items;
    for (const i64 u : ranks) items.insert(items.end(), lists_[at(u)].begin(), lists_[at(u)].end());
    std::sort(items.begin(), items.end(), lighter);
    std::vector<i64> before, target(items.size());
    std::vector<std::size_t> order(items.size());
    for (const Item& item : items) before.push_back(s_.rank_of[item.id]);
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (int k = 0; k < kDeals && s_.budget.spend(8 * items.size() * ranks.size()); ++k) {
      for (std::size_t i = order.size(); i > 1; --i) {
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[(random_ >> 33) % i]);
      }
      std::vector<Excess> load;
      for (const i64 u : ranks) load.emplace_back(0, u);
      for (const std::size_t i : order) {
        Excess& least = *std::min_element(load.begin(), load.end());
        least.first += items[i].weight;
        target[i] = least.second;
      }
      place(items, ranks, target);
      if (even(ranks)) return true;
    }
    place(items, ranks, before);
    return false;
  }

  void place(const List& items, const std::vector<i64>& ranks, const std::vector<i64>& target) {
    for (const i64 u : ranks) lists_[at(u)].clear();
    for (std::size_t i = 0; i < items.size(); ++i) {
      move(items[i], target[i]);
      lists_[at(target[i])].push_back(items[i]);
    }
  }

  bool relieve(i64 a, i64 b, i64 need, i64 room, How how) {
    if (!s_.budget.spend(16)) return false;
    const i64 amount = std::min(need, room);
    if (how == kWhatFits) return give(a, b, amount, 0);
    if (how == kSingle && amount > s_.typical) return give(a, b, amount, s_.typical);
    const Window window{need <= room ? need : std::max<i64>(1, room - waste_), room};
    const auto allows = [&](const Item& out, const Item& out2, const Item& in, const Item& in2) {
      return width_ > 1 ? s_.may_send(out, out2) && s_.may_send(in, in2)
                        : s_.may_receive(b, out, out2) && s_.may_receive(a, in, in2);
    };
    const List &from = lists_[at(a)], &to = lists_[at(b)];
    const Window half{1 + amount / 2, room};  // with no exact end, what takes half of it off
    const bool found =
        how == kSingle   ? trade_.find_single(from, to, window, allows, s_.budget)
        : how == kHeavy ? trade_.find_heavy(from, to, half, s_.budget)
                        : trade_.find_bundles(from, to, window, half, allows, s_.budget);
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
        if (width_ == 1 && !s_.may_receive(b, item, {0, 0})) continue;
        if (pass < 2 && !s_.may_send(item, {0, 0})) continue;
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

  Placement& s_;
  i64 width_, cap_, waste_ = 0;
  u64 random_ = 0;
  Trade trade_;
  std::vector<i64> load_;  // per unit
  std::vector<int> first_pass_;  // of give()
  std::vector<List> lists_;
  List given_;
};

}  // namespace orchmllm
