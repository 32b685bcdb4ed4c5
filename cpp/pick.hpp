// Taking items whose weights add up to a window: the search that `least_move` is made of.
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

inline void insert_sorted(List& list, const Item& item) {
  list.insert(std::upper_bound(list.begin(), list.end(), item, lighter), item);
}

inline Item remove_at(List& list, std::size_t index) {
  const Item item = list[index];
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(index));
  return item;
}

// First index with weight >= value.
inline std::size_t first_at_least(const List& list, i64 value) {
  const auto before = [](const Item& item, i64 v) { return item.weight < v; };
  return static_cast<std::size_t>(std::lower_bound(list.begin(), list.end(), value, before) -
                                  list.begin());
}

struct Window {
  i64 low, high;
  Window less(i64 weight) const { return {low - weight, high - weight}; }
  Window plus(i64 weight) const { return {low + weight, high + weight}; }
};

// Operations left before an attempt is given up; a clock would make plans differ between ranks.
struct Budget {
  i64 left;
  bool spend(std::size_t operations) {
    left -= static_cast<i64>(operations);
    return left >= 0;
  }
};

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// A rule says which items may go: `admits(item)`, and of two such items `admits_both(a, b)`.
struct AnyItem {
  bool admits(const Item&) const { return true; }
  bool admits_both(const Item&, const Item&) const { return true; }
};

// The lightest admitted item inside the window, or kNone.
template <class Rule>
std::size_t find_single(const List& list, Window window, const Rule& rule) {
  for (std::size_t i = first_at_least(list, window.low);
       i < list.size() && list[i].weight <= window.high; ++i) {
    if (rule.admits(list[i])) return i;
  }
  return kNone;
}

// Two items first < second, admitted together, with a sum inside the window; one sweep of both ends.
// Only indices >= from take part.
template <class Rule>
bool find_pair(const List& list, Window window, std::size_t from, const Rule& rule,
               std::size_t& first, std::size_t& second) {
  if (list.size() < from + 2) return false;
  first = from, second = list.size() - 1;
  while (first < second) {
    const i64 sum = list[first].weight + list[second].weight;
    if (sum > window.high || !rule.admits(list[second])) {
      --second;
    } else if (sum < window.low || !rule.admits(list[first])) {
      ++first;
    } else if (!rule.admits_both(list[first], list[second])) {
      --second;
    } else {
      return true;
    }
  }
  return false;
}

// A list of items that is emptied into `out` until the sum is inside the window. `rule.take(item)`
// hears of each item that went.
struct Picker {
  List& list;
  Window window;
  Budget& budget;
  List& out;

  bool done() const { return window.low <= 0; }

  template <class Rule>
  void take(std::size_t index, Rule& rule) {
    const Item item = remove_at(list, index);
    rule.take(item);
    out.push_back(item);
    window = window.less(item.weight);
  }

  // The heaviest first, while more than two typical items are missing.
  template <class Rule>
  void take_bulk(i64 typical, Rule& rule) {
    std::size_t top = list.size();
    while (top > 0 && window.low > 2 * typical) {
      top = std::min(top, first_at_least(list, window.low - typical + 1));
      if (top > 0 && rule.admits(list[--top])) take(top, rule);
    }
  }

  // One, two or three items that end inside the window. In long lists a third item does not help:
  // when no pair fits, that has a reason (all of one size).
  template <class Rule>
  bool take_exact(Rule& rule) {
    constexpr std::size_t kTripleItems = 128;
    constexpr int kSweeps = 64;
    const std::size_t single = find_single(list, window, rule);
    if (single != kNone) {
      take(single, rule);
      return true;
    }
    std::size_t first = 0, second = 0, third = kNone;
    bool found = find_pair(list, window, 0, rule, first, second);
    if (!found && list.size() <= kTripleItems) {
      third = first_at_least(list, window.high);
      for (int sweep = 0; !found && third > 0 && sweep < kSweeps; ++sweep) {
        if (!budget.spend(list.size())) return false;
        --third;
        found = rule.admits(list[third]) && find_pair(list, window.less(list[third].weight),
                                                      third + 1, rule, first, second);
      }
    }
    if (!found) return false;
    take(second, rule);
    take(first, rule);
    if (third != kNone) take(third, rule);
    return true;
  }

  // The heaviest item that still fits.
  template <class Rule>
  bool take_fitting(Rule& rule) {
    std::size_t fits = first_at_least(list, window.high + 1);
    while (fits > 0 && !rule.admits(list[fits - 1])) --fits;
    if (fits == 0) return false;
    take(fits - 1, rule);
    return true;
  }

  // All of the above. Without an exact solution, as much as fits.
  template <class Rule>
  void take_sum(i64 typical, Rule& rule) {
    take_bulk(typical, rule);
    while (!done() && !take_exact(rule) && take_fitting(rule)) {
    }
  }
};

}  // namespace orchmllm
