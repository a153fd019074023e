// Softmax of the scores of attention, a row at a time:
//
//     weight = exp(scale * score + mask - sum)      sum = log of the sum of exp(scale * score +
//     mask)
//
// The numbers of a row are added in 64 bytes of lanes, number j in lane j % lanes, and then the
// lanes in pairs. So the bits depend on the row only, as those of gemm.h, with which the kernels
// are compiled.
#pragma once

#include <cstdint>

namespace lockstep {

struct ScoreRows {
  bool is_double;
  int64_t rows, columns;  // the scores of a row are side by side, and the rows one after another
  // Row i sees only its first `seen` + i columns; the weights of the others are 0.
  int64_t seen;
  double scale;
  const void* mask;  // of the same type, or nullptr
  int64_t mask_row_stride, mask_column_stride;
};

struct Softmax {
  // Replaces scores by weights, and writes the sum of each row; that of a row that sees nothing is
  // 0 as its weights are.
  void (*normalize)(const ScoreRows& rows, void* scores, void* sums, int64_t sum_stride);
  // Replaces scores by weights, of sums that are known.
  void (*restore)(const ScoreRows& rows, void* scores, const void* sums, int64_t sum_stride);
  // Replaces gradients of weights by those of products, that is times the scale.
  void (*differentiate)(const ScoreRows& rows, const void* weights, void* gradients);
};

}  // namespace lockstep
