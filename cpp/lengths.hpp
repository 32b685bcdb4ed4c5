// The lengths of a global batch from what its ranks sent (orchmllm/plan/layout.py).
#pragma once

#include "common.hpp"

namespace orchmllm {

// Columns of a batch of num_segments segments, each at the place where the next rank's begin.
// columns (4, num_segments): modality, rows, attn_len, num_tokens.
struct Lengths {
  i64 *example_id, *num_targets, *segments_per_example, *columns, *grid;
  std::size_t num_segments;

  // Appends what one rank sent of n examples and s segments.
  void append(const i64* words, i64 num_words, i64 n, i64 s) {
    example_id = std::copy_n(words, n, example_id);
    if (num_words == 3 * n + 7 * s) {
      append_lengths(words + n, n, s);
    } else if (num_words == n + (2 * n + 7 * s + 1) / 2) {
      append_lengths(reinterpret_cast<const i32*>(words + n), n, s);
    } else {
      throw std::invalid_argument("num_words does not fit num_examples and num_segments");
    }
  }

 private:
  template <class Length>
  void append_lengths(const Length* from, i64 n, i64 s) {
    num_targets = std::copy_n(from, n, num_targets);
    segments_per_example = std::copy_n(from + n, n, segments_per_example);
    from += 2 * n;
    for (i64 k = 0; k < s; ++k, from += 7, ++columns) {
      for (std::size_t c = 0; c < 4; ++c) columns[c * num_segments] = from[c];
      grid = std::copy_n(from + 4, 3, grid);
    }
  }
};

}  // namespace orchmllm
