// `greedy`: longest-processing-time-first, the 4/3-approximation of OrchMLLM Algorithm 1.
//
// The printed algorithm mutates the key of a heap's top in place; here the top is replaced and
// sifted down. Items of weight zero stay home (printed: they all pile up on one rank).
#pragma once

#include "common.hpp"

namespace orchmllm {

// A binary min-heap of (load, rank) that supports one operation: add a weight to the least-loaded
// rank (ties: the lowest rank). The initial order is ascending, which is a heap.
// Load and rank share one 64-bit key when the total allows it: a comparison is then one
// instruction, and the choice of the lighter child needs no branch.
template <class Key>
class LoadHeap {
 public:
  LoadHeap(i64 num_ranks, View<i64> held) : keys_(static_cast<std::size_t>(num_ranks)) {
    for (std::size_t r = 0; r < keys_.size(); ++r) keys_[r] = Key(static_cast<u64>(r));
    for (std::size_t r = 0; r < held.size; ++r) {
      keys_[r] = keys_[r].plus(static_cast<u64>(held[r]));
    }
    if (held.size > 0) std::sort(keys_.begin(), keys_.end());
  }

  i64 add_to_least(i64 weight) {
    const std::size_t size = keys_.size();
    Key* keys = keys_.data();
    const Key moved = keys[0].plus(static_cast<u64>(weight));
    const i64 rank = moved.rank();
    std::size_t hole = 0, child = 1;
    for (; child + 1 < size; child = 2 * hole + 1) {
      child += keys[child + 1] < keys[child];
      if (!(keys[child] < moved)) break;
      keys[hole] = keys[child];
      hole = child;
    }
    if (child + 1 == size && keys[child] < moved) {
      keys[hole] = keys[child];
      hole = child;
    }
    keys[hole] = moved;
    return rank;
  }

 private:
  std::vector<Key> keys_;
};

constexpr int kRankBits = 20;

struct PackedKey {
  u64 value = 0;
  PackedKey() = default;
  explicit PackedKey(u64 rank) : value(rank) {}
  PackedKey plus(u64 weight) const { return PackedKey(value + (weight << kRankBits)); }
  i64 rank() const { return static_cast<i64>(value & ((u64{1} << kRankBits) - 1)); }
  bool operator<(const PackedKey& other) const { return value < other.value; }
};

struct WideKey {
  u64 load = 0, lane = 0;
  WideKey() = default;
  explicit WideKey(u64 rank) : lane(rank) {}
  WideKey plus(u64 weight) const {
    WideKey key = *this;
    key.load += weight;
    return key;
  }
  i64 rank() const { return static_cast<i64>(lane); }
  bool operator<(const WideKey& other) const {
    return load < other.load || (load == other.load && lane < other.lane);
  }
};

template <class Key>
void fill_heaviest_first(View<i64> weight, View<i64> home, i64 num_ranks, i64* rank_of,
                         View<i64> held) {
  LoadHeap<Key> heap(num_ranks, held);
  for (const i32 item : order_descending(weight)) {
    const auto i = static_cast<std::size_t>(item);
    rank_of[i] = weight[i] > 0 ? heap.add_to_least(weight[i]) : home[i];
  }
}

// rank_of[i] for every item; `home` is used by items of weight zero only. held: (num_ranks) what each
// rank has before any item comes, or empty.
inline void greedy(View<i64> weight, View<i64> home, i64 num_ranks, i64* rank_of,
                   View<i64> held) {
  if (num_ranks < (i64{1} << kRankBits) &&
      total(weight) + total(held) < (i64{1} << (63 - kRankBits))) {
    fill_heaviest_first<PackedKey>(weight, home, num_ranks, rank_of, held);
  } else {
    fill_heaviest_first<WideKey>(weight, home, num_ranks, rank_of, held);
  }
}

}  // namespace orchmllm
