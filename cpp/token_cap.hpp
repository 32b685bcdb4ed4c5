// A hard cap on the tokens (activation memory) of a rank, after balancing something else.
#pragma once

#include "common.hpp"

namespace orchmllm {

class TokenCap {
 public:
  TokenCap(View<i64> weight, View<i64> tokens, i64 num_ranks, i64 cap, i64* rank_of)
      : weight_(weight), tokens_(tokens), cap_(cap), rank_of_(rank_of),
        load_(size(num_ranks)), held_(size(num_ranks)), items_(size(num_ranks)) {
    for (const i32 i : order_descending(tokens)) {
      load_[size(rank_of[i])] += weight[size(i)];
      held_[size(rank_of[i])] += tokens[size(i)];
      items_[size(rank_of[i])].push_back(i);
    }
  }

  // Takes items off ranks above the cap, the longest first. Returns false if a rank stays above.
  bool enforce() {
    for (std::size_t a = 0; a < held_.size(); ++a) {
      while (held_[a] > cap_) {
        if (!give(a) && !swap(a)) return false;
      }
    }
    return true;
  }

 private:
  static std::size_t size(i64 value) { return static_cast<std::size_t>(value); }
  i64 tokens(i32 item) const { return tokens_[size(item)]; }

  void move(i32 item, std::size_t to) {
    const std::size_t from = size(rank_of_[item]);
    items_[from].erase(std::find(items_[from].begin(), items_[from].end(), item));
    const auto longer = [&](i32 a, i32 b) { return tokens(a) > tokens(b); };
    items_[to].insert(std::upper_bound(items_[to].begin(), items_[to].end(), item, longer), item);
    load_[from] -= weight_[size(item)], load_[to] += weight_[size(item)];
    held_[from] -= tokens(item), held_[to] += tokens(item);
    rank_of_[item] = static_cast<i64>(to);
  }

  // The longest item that has room anywhere, to the rank of least weight that has it.
  bool give(std::size_t a) {
    for (const i32 item : items_[a]) {
      if (tokens(item) == 0) return false;
      std::size_t best = held_.size();
      for (std::size_t b = 0; b < held_.size(); ++b) {
        const bool room = b != a && held_[b] + tokens(item) <= cap_;
        if (room && (best == held_.size() || load_[b] < load_[best])) best = b;
      }
      if (best == held_.size()) continue;
      move(item, best);
      return true;
    }
    return false;
  }

  // The longest item that can be exchanged for a shorter one of a rank that stays below the cap.
  bool swap(std::size_t a) {
    for (const i32 item : items_[a]) {
      for (std::size_t b = 0; b < held_.size(); ++b) {
        if (b == a || held_[b] >= cap_) continue;
        for (const i32 other : items_[b]) {
          if (tokens(other) >= tokens(item) || held_[b] + tokens(item) - tokens(other) > cap_) {
            continue;
          }
          move(other, a);
          move(item, b);
          return true;
        }
      }
    }
    return false;
  }

  View<i64> weight_, tokens_;
  i64 cap_;
  i64* rank_of_;
  std::vector<i64> load_, held_;         // per rank: weight and tokens
  std::vector<std::vector<i32>> items_;  // per rank, longest first
};

}  // namespace orchmllm
