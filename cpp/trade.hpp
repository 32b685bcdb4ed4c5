// What two units can trade: items of one against items of the other.
#pragma once

#include "placement.hpp"

namespace orchmllm {

// Bundles of items of a list: what they weigh together, one of each weight.
class Bundles {
 public:
  struct Bundle {
    i64 weight;
    u32 items;  // a bit for each of those that bundles are made of
  };
  std::vector<Bundle> all;  // ascending; the first has no items

  // Makes the bundles of at most `most` items. False if the budget is used up.
  bool make(const List& list, int most, Budget& budget) {
    choose(list, most);
    all.assign(1, {0, 0});
    for (std::size_t k = 0; k < chosen_.size() && all.size() < kMany; ++k) {
      if (!budget.spend(2 * all.size())) return false;
      add(list[chosen_[k]].weight, u32{1} << k, most);
    }
    return budget.spend(list.size());
  }

  void items(const List& list, const Bundle& bundle, List& out) const {
    out.clear();
    for (std::size_t k = 0; k < chosen_.size(); ++k) {
      if (bundle.items >> k & 1) out.push_back(list[chosen_[k]]);
    }
  }

 private:
  // That bundles are made of, evenly spaced; of those of two, half as many.
  static constexpr std::size_t kItems = 24;
  static constexpr std::size_t kMany = 512;  // bundles, to which no item is added any more

  // Of bundles of two, two items of each weight are enough.
  void choose(const List& list, int most) {
    chosen_.clear();
    for (std::size_t k = 0; k < list.size(); ++k) {
      if (most > 2 || k < 2 || list[k].weight != list[k - 2].weight) {
        chosen_.push_back(static_cast<u32>(k));
      }
    }
    const std::size_t all = chosen_.size(), count = std::min(most > 2 ? kItems : kItems / 2, all);
    for (std::size_t k = 0; k < count; ++k) chosen_[k] = chosen_[k * all / count];
    chosen_.resize(count);
  }

  // Merges the bundles with those that have one item more.
  void add(i64 weight, u32 item, int most) {
    merged_.clear();
    std::size_t i = 0;
    for (const Bundle& bundle : all) {
      if (__builtin_popcount(bundle.items) == most) continue;
      const Bundle more{bundle.weight + weight, bundle.items | item};
      while (i < all.size() && all[i].weight <= more.weight) merged_.push_back(all[i++]);
      if (merged_.back().weight < more.weight) merged_.push_back(more);
    }
    merged_.insert(merged_.end(), all.begin() + static_cast<std::ptrdiff_t>(i), all.end());
    all.swap(merged_);
  }

  std::vector<u32> chosen_;
  std::vector<Bundle> merged_;
};

class Trade {
 public:
  List out, back;  // ascending; what goes from a to b, and from b to a

  // One item of `a`, against none or one of `b`, whose difference in weight is inside the window
  // (low >= 1): the least weight going back, then the least going out. allows() has the last word
  // on `out` and `back`.
  template <class Rule>
  bool find_single(const List& a, const List& b, Window window, const Rule& allows,
                   Budget& budget) {
    if (!budget.spend(b.size() + 16)) return false;
    std::size_t first = first_at_least(a, window.low), refused = 0;
    for (std::size_t j = 0; j <= b.size() && first < a.size(); ++j) {
      const i64 returned = j == 0 ? 0 : b[j - 1].weight;
      back.clear();
      if (j > 0) back.push_back(b[j - 1]);
      while (first < a.size() && a[first].weight < window.low + returned) ++first;
      for (std::size_t i = first; i < a.size() && a[i].weight <= window.high + returned; ++i) {
        out.assign(1, a[i]);
        if (allows()) return true;
        if (++refused == kRefusals || !budget.spend(8)) return false;
      }
    }
    return false;
  }

  // The same with bundles of at most `most` items, in the first of two windows that has any. Those
  // of `a` are made by make_bundles(a) before.
  template <class Rule>
  bool find_bundles(const List& a, const List& b, int most, Window first, Window second,
                    const Rule& allows, Budget& budget) {
    return backs_.make(b, most, budget) && budget.spend(outs_.all.size() + backs_.all.size()) &&
           (match(a, b, first, allows, budget) || match(a, b, second, allows, budget));
  }

  bool make_bundles(const List& a, int most, Budget& budget) {
    return outs_.make(a, most, budget);
  }

  // One heavy item of `a` against several of `b`, the heaviest that fit first.
  bool find_heavy(const List& a, const List& b, Window window, Budget& budget) {
    for (std::size_t i = first_at_least(a, window.high + 1); i < a.size(); ++i) {
      if (i > 0 && a[i].weight == a[i - 1].weight) continue;
      if (!budget.spend(b.size() + 8)) return false;
      i64 low = a[i].weight - window.high, high = a[i].weight - window.low;
      back.clear();
      for (std::size_t j = b.size(); j > 0 && low > 0; --j) {
        if (b[j - 1].weight > high) continue;
        back.push_back(b[j - 1]);
        low -= b[j - 1].weight, high -= b[j - 1].weight;
      }
      if (low > 0) continue;
      out.assign(1, a[i]);
      std::reverse(back.begin(), back.end());
      return true;
    }
    return false;
  }

 private:
  static constexpr std::size_t kRefusals = 16;

  template <class Rule>
  bool match(const List& a, const List& b, Window window, const Rule& allows, Budget& budget) {
    std::size_t i = 0, refused = 0;
    for (const Bundles::Bundle& returned : backs_.all) {
      while (i < outs_.all.size() && outs_.all[i].weight < window.low + returned.weight) ++i;
      if (i == outs_.all.size()) return false;
      if (outs_.all[i].weight > window.high + returned.weight) continue;
      outs_.items(a, outs_.all[i], out);
      backs_.items(b, returned, back);
      if (allows()) return true;
      if (++refused == kRefusals || !budget.spend(8)) return false;
    }
    return false;
  }

  Bundles outs_, backs_;
};

}  // namespace orchmllm
