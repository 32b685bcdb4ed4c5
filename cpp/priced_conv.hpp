// Batches for `conv_transformer` by prices: a length is worth what it costs alone plus what others lose by it.
#pragma once

#include "common.hpp"

namespace orchmllm {

// Taking the heaviest item that fits wastes padding: whether 8 items just below bound / 8 pack well
// depends on whether longer ones are left to fill the rest. So a value has a price beside weight and
// pad, the loss that one item of it causes in a batch (a dual of the configuration LP, which
// scripts/prove_conv_bound.py solves). A batch opens with the heaviest item left and takes `lead`
// of the heaviest, then items that share what is left evenly; of all (count, lead) it takes what
// loses least by these prices. After a pass every price moves by the mean loss of its batches.
class PricedConv {
 public:
  // Distinct weights in descending order, the pad and the number of items of each.
  PricedConv(const std::vector<i64>& value, const std::vector<i64>& pad,
             const std::vector<i64>& items, i64 num_ranks)
      : value_(value), pad_(pad), items_(items), num_ranks_(num_ranks) {
    while (value[0] >> shift_ >= kBuckets) ++shift_;
    std::size_t k = value.size();
    for (i64 bucket = 0; bucket <= value[0] >> shift_; ++bucket) {
      while (k > 0 && value[k - 1] >> shift_ <= bucket) --k;
      bucket_.push_back(k);
    }
  }

  // Searches bounds in [low, high), low at least the cost of the longest item alone; true if batches
  // below `high` were found (see `batches`).
  bool run(i64 low, i64 high) {
    if (high >= kLargest || low >= high || n() > kMostValues) return false;
    i64 bound = std::max(low, high - 1 - high / kFirstStep);
    start(high);
    bool found = false;
    for (i64 pass = 0; pass < kPasses && work_ < kWork && low < high; ++pass) {
      i64 free = 0;
      const i64 over = fill(bound, free);
      learn(pass);
      if (over > 0) {
        bound += over / num_ranks_ + 1;  // what did not fit, shared by all batches
      } else {
        found = true;
        best_.swap(picked_);
        high = bound;
        bound -= free / num_ranks_ + 1;
      }
      bound = std::clamp(bound, low, std::max(low, high - 1 - high / kLastStep));
    }
    return found;
  }

  // Indices into value, a batch after the other, each batch ended by -1.
  const std::vector<i32>& batches() const { return best_; }

 private:
  static constexpr i64 kUnit = 64;                     // price of one unit of weight
  static constexpr i64 kLargest = i64{1} << 44;        // of costs: keeps sums of prices in 64 bits
  static constexpr i64 kPasses = 48, kWork = 580'000;
  static constexpr i64 kFirstStep = 1024, kLastStep = 16384, kBuckets = 4096;
  static constexpr std::size_t kMostValues = 1 << 13;  // with more, one pass is over the budget
  static constexpr std::size_t kTried = 3;             // patterns that are built

  struct Pattern {
    i64 loss, count, lead;
  };
  struct Batch {
    i64 loss = 0, free = 0;
    std::vector<i32> values;
    i64 size() const { return static_cast<i64>(values.size()); }
  };

  std::size_t n() const { return value_.size(); }

  // The first value >= k (in descending order) of which an item is left.
  std::size_t alive(std::size_t k) {
    for (;;) {
      while (next_[k] != k) {
        next_[k] = next_[next_[k]];
        k = next_[k];
      }
      if (k == n() || left_[k] > 0) return k;
      ++k;  // taken by the batch that is being built
    }
  }

  // The heaviest value <= weight of which an item is left.
  std::size_t at_most(i64 weight) {
    if (weight >= value_[0]) return alive(0);
    const auto bucket = static_cast<std::size_t>(weight >> shift_);
    const auto begin = value_.begin() + static_cast<std::ptrdiff_t>(bucket_[bucket]);
    const auto end = bucket == 0 ? value_.end()
                                 : value_.begin() + static_cast<std::ptrdiff_t>(bucket_[bucket - 1]);
    return alive(static_cast<std::size_t>(
        std::lower_bound(begin, end, weight, std::greater<i64>()) - value_.begin()));
  }

  void reset() {
    left_ = items_;
    next_.resize(n() + 1);
    std::iota(next_.begin(), next_.end(), std::size_t{0});
  }

  // First prices, also the highest: what a value loses in batches of its own with one filler.
  void start(i64 bound) {
    reset();
    price_.resize(n());
    highest_.resize(n());
    for (std::size_t k = 0; k < n(); ++k) {
      const i64 own = value_[k] + pad_[k], count = bound / own, room = bound - count * own;
      const std::size_t filler = room > pad_[k] ? at_most(room - pad_[k]) : n();
      const i64 loss = filler < n() ? room - value_[filler] - pad_[filler] : room;
      highest_[k] = kUnit * loss / count;
      price_[k] = kUnit * loss * 9 / (10 * (count + (filler < n())));
    }
    lowest_ = -(kUnit * bound / 512);
  }

  i64 worth(std::size_t k) const { return kUnit * pad_[k] + price_[k]; }

  // Fills num_ranks batches; returns weight and pad of what is left over, sets what stays free.
  i64 fill(i64 bound, i64& free) {
    reset();
    picked_.clear();
    loss_.assign(n(), 0);
    std::size_t last = n();
    Pattern pattern{};
    i64 accepted = 0;
    for (i64 rank = 0; rank < num_ranks_; ++rank) {
      const std::size_t k = alive(0);
      if (k == n()) {
        free += (num_ranks_ - rank) * bound;
        break;
      }
      // The last batch's pattern mostly serves again; the search is the dear part.
      if (k == last) build(bound, k, pattern);
      if (k == last && built_.loss <= accepted) {
        std::swap(batch_, built_);
      } else {
        pattern = choose(bound, k);
        accepted = batch_.loss + kUnit * bound / 16384;
      }
      last = k;
      free += batch_.free;
      commit();
    }
    i64 over = 0;
    for (std::size_t k = alive(0); k < n(); k = alive(k + 1)) {
      over += left_[k] * (value_[k] + pad_[k]);
    }
    return over;
  }

  // Finds the pattern that opens with value k and loses least, and fills batch_ by it.
  Pattern choose(i64 bound, std::size_t k) {
    tried_.clear();
    const i64 least = std::max<i64>(1, bound / (value_[k] + pad_[k]));
    for (i64 count = least; count <= least + 1; ++count) estimate(bound, k, count);
    if (tried_.empty()) tried_.push_back({0, 1, 1});  // the last few items
    Pattern best{};
    batch_.loss = std::numeric_limits<i64>::max();
    for (const Pattern& pattern : tried_) {
      if (pattern.loss >= batch_.loss) break;  // estimates are mostly too low
      build(bound, k, pattern);
      if (built_.loss < batch_.loss) {
        best = pattern;
        std::swap(batch_, built_);
      }
    }
    return best;
  }

  // Keeps the patterns of `count` items that lose least if the items that share what `lead` leave
  // all have the value that fits best.
  void estimate(i64 bound, std::size_t k, i64 count) {
    const i64 pad = pad_[k], longest = value_[k], stride = 1 + count / 12;
    i64 room = bound - count * pad, gain = 0, taken = 0;
    for (i64 lead = 1; lead <= count; ++lead, ++work_) {
      if (taken == left_[k]) k = alive(k + 1), taken = 0;
      if (k == n() || value_[k] > room) return;
      ++taken;
      room -= value_[k];
      gain += worth(k);
      const i64 rest = count - lead;
      if (rest % stride != 1 % stride) continue;
      i64 loss = kUnit * count * pad - gain;
      if (rest > 0) {
        const i64 share = std::min(longest, room / rest);
        const std::size_t other = at_most(share);
        if (other == n()) continue;
        loss -= rest * worth(other);
        if (share == longest) loss += kUnit * (room - rest * share);  // too few items to fill it
      } else {
        loss += kUnit * room;
      }
      keep({loss, count, lead});
    }
  }

  void keep(Pattern pattern) {
    if (tried_.size() == kTried && pattern.loss >= tried_.back().loss) return;
    if (tried_.size() == kTried) tried_.pop_back();
    auto at = tried_.end();
    while (at != tried_.begin() && pattern.loss < (at - 1)->loss) --at;
    tried_.insert(at, pattern);
  }

  // Fills built_ by a pattern; takes nothing away.
  void build(i64 bound, std::size_t k, const Pattern& pattern) {
    built_.values.clear();
    const std::size_t first = k;
    const i64 pad = pad_[first];
    i64 room = bound - pattern.count * pad;
    for (i64 lead = 0; lead < pattern.lead && k < n() && value_[k] <= room; ++lead) {
      take(k, room);
      k = alive(k);
    }
    for (i64 rest = pattern.count - built_.size(); rest > 0; --rest) {
      const std::size_t other = at_most(room / rest);
      if (other == n()) break;
      take(other, room);
    }
    room += (pattern.count - built_.size()) * pad;
    while (room > pad) {  // whatever else fits
      const std::size_t other = at_most(std::min(room - pad, value_[first]));
      if (other == n()) break;
      take(other, room);
      room -= pad;
    }
    work_ += built_.size();
    built_.free = room;
    built_.loss = kUnit * (room + built_.size() * pad);
    for (const i32 i : built_.values) {
      built_.loss -= worth(static_cast<std::size_t>(i));
      ++left_[static_cast<std::size_t>(i)];
    }
  }

  void take(std::size_t k, i64& room) {
    built_.values.push_back(static_cast<i32>(k));
    room -= value_[k];
    --left_[k];
  }

  // Hands batch_ out and notes its loss for its values.
  void commit() {
    for (const i32 i : batch_.values) {
      const auto k = static_cast<std::size_t>(i);
      if (--left_[k] == 0) next_[k] = k + 1;
      loss_[k] += batch_.loss / batch_.size();
    }
    picked_.insert(picked_.end(), batch_.values.begin(), batch_.values.end());
    picked_.push_back(-1);
  }

  // Moves prices by the mean loss of the values next to each, by less in later passes.
  void learn(i64 pass) {
    const std::size_t reach = 2;
    for (std::size_t k = 0; k < n(); ++k) {
      i64 loss = 0, items = 0;
      for (std::size_t i = k - std::min(k, reach); i < std::min(n(), k + reach + 1); ++i) {
        loss += loss_[i];
        items += items_[i] - left_[i];
      }
      if (items == 0) continue;
      price_[k] =
          std::clamp(price_[k] + loss / items * 16 / (10 + pass), lowest_, highest_[k]);
    }
  }

  const std::vector<i64>& value_;
  const std::vector<i64>& pad_;
  const std::vector<i64>& items_;
  i64 num_ranks_, shift_ = 0, lowest_ = 0, work_ = 0;
  std::vector<i64> left_, price_, highest_, loss_;
  std::vector<std::size_t> next_, bucket_;  // bucket_: first value of each or a lower one
  Batch batch_, built_;
  std::vector<i32> picked_, best_;
  std::vector<Pattern> tried_;
};

}  // namespace orchmllm
