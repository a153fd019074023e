// Sums along the tree of blocks that are computed for one micro-batch after the other, in memory of
// the calling thread. The blocks that wait for another are one after another:
//
//     segment     0     1        2        3
//     waiting     0     0+1      0+1, 2   (0+1)+(2+3)
#pragma once

#include <cstdint>

namespace lockstep {

// How many blocks wait at most, beside the sum.
inline int64_t count_waiting(int64_t segments) {
  int64_t depth = 0;
  for (int64_t rest = segments - 1; rest; rest >>= 1) ++depth;
  return depth;
}

// Calls compute(segment, block, pitch) for each segment, which writes a block, and adds the blocks.
//
// `sum`: the result, of which rows lie `pitch` elements apart.
// `scratch`: memory for the blocks that wait, each of rows * columns elements.
template <typename T, typename Compute>
void sum_segments(int64_t segments, int64_t rows, int64_t columns, T* sum, int64_t pitch,
                  T* scratch, const Compute& compute) {
  const auto find_block = [&](int64_t number) {
    return number ? scratch + (number - 1) * rows * columns : sum;
  };
  const auto find_pitch = [&](int64_t number) { return number ? columns : pitch; };
  int64_t waiting = 0;
  const auto join = [&] {
    --waiting;
    T* left = find_block(waiting - 1);
    const T* right = find_block(waiting);
    for (int64_t row = 0; row < rows; ++row, left += find_pitch(waiting - 1), right += columns)
      for (int64_t column = 0; column < columns; ++column) left[column] += right[column];
  };
  for (int64_t segment = 0; segment < segments; ++segment) {
    compute(segment, find_block(waiting), find_pitch(waiting));
    ++waiting;
    for (int64_t leaf = segment; leaf & 1; leaf >>= 1) join();
  }
  while (waiting > 1) join();
}

}  // namespace lockstep
