// What two ranks can trade when giving alone does not reach the window.
#pragma once

#include "pick.hpp"

namespace orchmllm {

// `out` are indices of list a, `back` of list b; kNone: unused.
struct Trade {
  std::size_t out[2] = {kNone, kNone};
  std::size_t back[2] = {kNone, kNone};
};

// What goes to rank b has to be admitted by `out`, what goes to rank a by `back`.

// One item of `a` against one of `b` whose difference is inside the window: the lightest of `b`
// that has a partner.
template <class Rule>
bool find_swap(const List& a, const List& b, Window window, const Rule& out, const Rule& back,
               Budget& budget, Trade& trade) {
  if (!budget.spend(a.size() + b.size())) return false;
  std::size_t i = 0;
  for (std::size_t j = 0; j < b.size(); ++j) {
    const Window shifted = window.plus(b[j].weight);
    while (i < a.size() && a[i].weight < shifted.low) ++i;
    if (i == a.size()) return false;
    if (a[i].weight <= shifted.high && out.admits(a[i]) && back.admits(b[j])) {
      trade.out[0] = i, trade.back[0] = j;
      return true;
    }
  }
  return false;
}

// Two items of `a` against one of `b`, or one against two.
template <class Rule>
bool find_uneven_swap(const List& a, const List& b, Window window, const Rule& out,
                      const Rule& back, Budget& budget, Trade& trade) {
  for (std::size_t j = 0; j < b.size() && budget.spend(a.size()); ++j) {
    if (!back.admits(b[j])) continue;
    if (find_pair(a, window.plus(b[j].weight), 0, out, trade.out[0], trade.out[1])) {
      trade.back[0] = j;
      return true;
    }
  }
  for (std::size_t i = 0; i < a.size() && budget.spend(b.size()); ++i) {
    const Window needed{a[i].weight - window.high, a[i].weight - window.low};
    if (needed.high < 0 || !out.admits(a[i])) continue;
    if (find_pair(b, needed, 0, back, trade.back[0], trade.back[1])) {
      trade.out[0] = i, trade.out[1] = kNone;
      return true;
    }
  }
  trade = {};
  return false;
}

// Two items against two; gives up after kSweeps sweeps of `a`.
template <class Rule>
bool find_double_swap(const List& a, const List& b, Window window, const Rule& out,
                      const Rule& back, Budget& budget, Trade& trade) {
  constexpr int kSweeps = 200;
  int sweeps = 0;
  for (std::size_t j = 1; j < b.size(); ++j) {
    for (std::size_t k = 0; k < j; ++k) {
      if (++sweeps > kSweeps || !budget.spend(a.size())) return trade = {}, false;
      if (!back.admits_both(b[k], b[j])) continue;
      const Window needed = window.plus(b[j].weight + b[k].weight);
      if (find_pair(a, needed, 0, out, trade.out[0], trade.out[1])) {
        trade.back[0] = k, trade.back[1] = j;
        return true;
      }
    }
  }
  trade = {};
  return false;
}

// One heavy item of `a` against several of `b`: for a rank that has nothing light to give. The
// items of `b` are moved to `back`; returns the index in `a`, or kNone and leaves `b` as it was.
template <class Rule>
std::size_t find_bulk_swap(const List& a, List& b, Window window, i64 typical, const Rule& rule,
                           Budget& budget, List& back) {
  for (std::size_t i = first_at_least(a, window.high + 1); i < a.size(); ++i) {
    if (!budget.spend(b.size())) break;
    if (i > 0 && a[i].weight == a[i - 1].weight) continue;
    Picker picker{b, {a[i].weight - window.high, a[i].weight - window.low}, budget, back};
    Rule taking = rule;
    picker.take_sum(typical, taking);
    if (picker.done()) return i;
    for (const Item& item : back) insert_sorted(b, item);
    back.clear();
  }
  return kNone;
}

}  // namespace orchmllm
