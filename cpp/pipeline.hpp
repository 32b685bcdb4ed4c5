// Pipeline schedules: when every operation of an iteration runs, a search for the best order of the
// microbatches, and Algorithm 3 of DistTrain. Slow twin: tests/twins/pipeline.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "common.hpp"

namespace orchmllm {

// S stages, l microbatches. An operation's code is (kind * S + stage) * l + slot, kind 0 forward and
// 1 backward; slot k runs microbatch order[k]. duration: (2 * S, l), comm: (S - 1,) between stages.
class Pipeline {
 public:
  Pipeline(const i64* ops, i64 devices, i64 per_device, i64 stages, i64 slots,
           const double* duration, const double* comm)
      : stages_(stages), slots_(slots), duration_(duration), comm_(comm), device_of_(stages, -1) {
    std::vector<i64> next(devices, 0), last(devices, 0);
    at_.assign(2 * stages * slots, -1);
    for (i64 k = 0; k < devices * per_device; ++k) {
      device_of_[ops[k] / slots % stages] = k / per_device;
    }
    ops_.push_back({});  // operation 0 has ended at 0: what the first ones wait for
    prefix_.push_back(1);
    for (i64 known = 1; known <= slots; ++known) {  // operations of known slots come first
      for (bool moved = true; moved;) {
        moved = false;
        for (i64 d = 0; d < devices; ++d) {
          for (; next[d] < per_device; ++next[d]) {
            const i64 code = ops[d * per_device + next[d]];
            if (code % slots >= known) break;
            const i64 row = code / slots, slot = code % slots, before = previous(row);
            const i64 wait = before < 0 ? 0 : at_[before * slots + slot];
            if (wait < 0) break;
            at_[code] = static_cast<i64>(ops_.size());
            ops_.push_back({row, slot, last[d], wait, before < 0 ? 0.0 : delay(row, before)});
            last[d] = at_[code];
            moved = true;
          }
        }
      }
      prefix_.push_back(static_cast<i64>(ops_.size()));
    }
    if (static_cast<i64>(ops_.size()) != 2 * stages * slots + 1) {
      throw std::invalid_argument("ops are no schedule: some operation waits for ever");
    }
    end_.assign(ops_.size(), 0.0);
    trial_.assign(ops_.size(), 0.0);
  }

  // Total time; start, end: (2 * S, l) by microbatch.
  double times(const i64* order, double* start, double* end) {
    const double total = run(order, end_, 1, end_.size());
    for (std::size_t k = 1; k < ops_.size(); ++k) {
      const i64 at = ops_[k].row * slots_ + order[ops_[k].slot];
      end[at] = end_[k];
      start[at] = end_[k] - duration_[at];
    }
    return total;
  }

  // Improves order by random swaps and insertions, kept when the total time does not grow.
  double search(i64* order, i64 max_evaluations, u64 seed) {
    double best = run(order, end_, 1, end_.size());
    std::vector<i64> moved(order, order + slots_);
    for (i64 k = 1; k < max_evaluations && slots_ > 1; ++k) {
      const i64 a = draw(seed, slots_), b = (a + 1 + draw(seed, slots_ - 1)) % slots_;
      std::copy(order, order + slots_, moved.begin());
      if (draw(seed, 2)) {
        std::swap(moved[a], moved[b]);
      } else if (a < b) {
        std::rotate(moved.begin() + a, moved.begin() + a + 1, moved.begin() + b + 1);
      } else {
        std::rotate(moved.begin() + b, moved.begin() + a, moved.begin() + a + 1);
      }
      const auto first = static_cast<std::size_t>(prefix_[std::min(a, b)]);
      std::copy(end_.begin(), end_.begin() + first, trial_.begin());
      const double total = run(moved.data(), trial_, first, end_.size());
      if (total > best) continue;
      best = total;
      std::copy(moved.begin(), moved.end(), order);
      std::swap(end_, trial_);
    }
    return best;
  }

  // DistTrain's Algorithm 3, with the bound of its loop corrected, for 1F1B with a stage a device.
  // size: (l,) what MIN and SELECTMIN compare; forwards of stage 0 fill the intervals.
  void inter_reorder(const double* size, i64* order) {
    std::vector<i64> left(slots_);
    for (i64 m = 0; m < slots_; ++m) left[m] = m;
    std::stable_sort(left.begin(), left.end(), [&](i64 a, i64 b) { return size[a] < size[b]; });
    const i64 p = stages_, rear = slots_ < 2 * p - 1 ? slots_ - 1 : p - 1;
    for (i64 k = 0; k < rear; ++k) order[slots_ - 1 - k] = left[1 + k];  // the smallest at the end
    order[0] = left[0];
    left.erase(left.begin(), left.begin() + 1 + rear);
    i64 known = 1;
    run(order, end_, 1, static_cast<std::size_t>(prefix_[1]));
    double interval = 0.0;  // the first: what follows the first microbatch downstream
    for (i64 s = 1; s < p; ++s) {
      interval += time(s, order[0]) + time(p + s, order[0]) + 2 * comm_[s - 1];
    }
    while (!left.empty()) {
      const double share = known < p ? interval / static_cast<double>(p - known) : interval;
      const auto best = std::min_element(left.begin(), left.end(), [&](i64 a, i64 b) {
        return std::abs(time(0, a) - share) < std::abs(time(0, b) - share);
      });
      interval -= time(0, *best);
      order[known++] = *best;
      left.erase(best);
      run(order, end_, static_cast<std::size_t>(prefix_[known - 1]),
          static_cast<std::size_t>(prefix_[known]));
      if (p > 1 && known >= p) interval = gap(known - p);
    }
  }

 private:
  struct Op {
    i64 row = 0, slot = 0, last = 0, wait = 0;
    double delay = 0.0;
  };

  double time(i64 row, i64 microbatch) const { return duration_[row * slots_ + microbatch]; }

  // The row whose result a row needs: the stage before, or after it on the way back.
  i64 previous(i64 row) const {
    if (row < stages_) return row - 1;
    return row == 2 * stages_ - 1 ? stages_ - 1 : row + 1;
  }

  double delay(i64 row, i64 before) const {
    const i64 a = row % stages_, b = before % stages_;
    return device_of_[a] == device_of_[b] ? 0.0 : comm_[std::min(a, b)];
  }

  double run(const i64* order, std::vector<double>& end, std::size_t first, std::size_t stop) {
    double total = 0.0;
    for (std::size_t k = first; k < stop; ++k) {
      const Op& op = ops_[k];
      const double begin = std::max(end[op.last], end[op.wait] + op.delay);
      end[k] = begin + duration_[op.row * slots_ + order[op.slot]];
      total = std::max(total, end[k]);
    }
    return total;
  }

  // Time between stage 0's i-th backward (from 0) and the moment when its next one could start.
  double gap(i64 i) const {
    const i64 row = stages_ * slots_;
    return end_[at_[row + slots_ + i + 1]] + comm_[0] - end_[at_[row + i]];
  }

  static i64 draw(u64& state, i64 n) {  // splitmix64
    u64 z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<i64>((z ^ (z >> 31)) % static_cast<u64>(n));
  }

  i64 stages_, slots_;
  const double *duration_, *comm_;
  std::vector<i64> device_of_, prefix_, at_;
  std::vector<Op> ops_;
  std::vector<double> end_, trial_;
};

}  // namespace orchmllm
