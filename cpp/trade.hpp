// What two ranks can trade: up to two items of one against up to two of the other.
#pragma once

#include "placement.hpp"

namespace orchmllm {

class Trade {
 public:
  List out, back;  // ascending; what goes from a to b, and from b to a

  // One item of `a`, against none or one of `b`, whose difference in weight is inside the window
  // (low >= 1): the least weight going back, then the least going out. allows(out, out, back, back)
  // has the last word; an item that is not there has weight 0.
  template <class Rule>
  bool find_single(const List& a, const List& b, Window window, const Rule& allows,
                   Budget& budget) {
    if (!budget.spend(b.size() + 16)) return false;
    std::size_t first = first_at_least(a, window.low), refused = 0;
    for (std::size_t j = 0; j <= b.size() && first < a.size(); ++j) {
      const Item& returned = j == 0 ? nothing_ : b[j - 1];
      while (first < a.size() && a[first].weight < window.low + returned.weight) ++first;
      for (std::size_t i = first; i < a.size() && a[i].weight <= window.high + returned.weight; ++i) {
        if (!allows(a[i], nothing_, returned, nothing_)) {
          if (++refused == kRefusals || !budget.spend(8)) return false;
          continue;
        }
        out.assign(1, a[i]);
        back.assign(j == 0 ? 0 : 1, returned);
        return true;
      }
    }
    return false;
  }

  // The same with bundles of up to two items, in the first of two windows that has any. Sums of `a`
  // are listed by list_bundles(a) before.
  template <class Rule>
  bool find_bundles(const List& a, const List& b, Window first, Window second, const Rule& allows,
                    Budget& budget) {
    return list(b, backs_, budget) && (match(a, b, first, allows) || match(a, b, second, allows));
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

  bool list_bundles(const List& a, Budget& budget) { return list(a, outs_, budget); }

 private:
  struct Bundle {
    i64 weight;
    u32 first, second;  // indices; equal: one item, or none if the weight is 0
    bool operator<(const Bundle& other) const { return weight < other.weight; }
  };
  static constexpr std::size_t kRefusals = 16;
  static constexpr std::size_t kItems = 24;  // that bundles are made of, evenly spaced

  // All bundles of up to two items, ascending. Two items of each weight are enough.
  bool list(const List& items, std::vector<Bundle>& found, Budget& budget) {
    kept_.clear();
    for (std::size_t k = 0; k < items.size(); ++k) {
      if (k < 2 || items[k].weight != items[k - 2].weight) kept_.push_back(static_cast<u32>(k));
    }
    const std::size_t all = kept_.size(), count = std::min(kItems, all);
    for (std::size_t k = 0; k < count; ++k) kept_[k] = kept_[k * all / count];
    if (!budget.spend(items.size() + 4 * count * count)) return false;
    found.assign(1, {0, 0, 0});
    for (std::size_t k = 0; k < count; ++k) {
      const i64 weight = items[kept_[k]].weight;
      found.push_back({weight, kept_[k], kept_[k]});
      for (std::size_t l = k + 1; l < count; ++l) {
        found.push_back({weight + items[kept_[l]].weight, kept_[k], kept_[l]});
      }
    }
    std::stable_sort(found.begin(), found.end());
    return true;
  }

  template <class Rule>
  bool match(const List& a, const List& b, Window window, const Rule& allows) {
    std::size_t i = 0;
    for (const Bundle& returned : backs_) {
      while (i < outs_.size() && outs_[i].weight < window.low + returned.weight) ++i;
      if (i == outs_.size()) return false;
      if (outs_[i].weight > window.high + returned.weight) continue;
      const Bundle& sent = outs_[i];
      if (allows(first(a, sent), second(a, sent), first(b, returned), second(b, returned))) {
        out = items(a, sent);
        back = items(b, returned);
        return true;
      }
    }
    return false;
  }

  const Item& first(const List& list, const Bundle& bundle) const {
    return bundle.weight == 0 ? nothing_ : list[bundle.first];
  }
  const Item& second(const List& list, const Bundle& bundle) const {
    return bundle.first == bundle.second ? nothing_ : list[bundle.second];
  }

  static List items(const List& list, const Bundle& bundle) {
    if (bundle.weight == 0) return {};
    if (bundle.first == bundle.second) return {list[bundle.first]};
    return {list[bundle.first], list[bundle.second]};
  }

  const Item nothing_{0, 0};
  std::vector<Bundle> outs_, backs_;
  std::vector<u32> kept_;
};

}  // namespace orchmllm
