// Reduces n inputs along the tree, element by element, in one pass over memory.
//
//     node(lo, hi) = node(lo, mid) + node(mid, hi)
//     mid - lo     = the largest power of two below hi - lo
//
// The tree is a program for a stack: push an input, or combine the two values on top. It
// runs on blocks that are small enough for the L1 cache, scratch included, so each input is
// read from memory once and each output written once. The order depends only on the number
// of leaves, so every rank gets the same bits.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "kernels.h"

namespace lockstep {

constexpr int kCombine = -1;

// Returns the steps for inputs 0, 1, ... that are the nodes [lo, hi) in `nodes`, which
// together cover all leaves. Nodes that are not `present` are left out of the sum (an empty
// list: all are present).
std::vector<int> tree_steps(const std::vector<std::pair<int, int>>& nodes, int leaves,
                            const std::vector<bool>& present = {});
// Returns the steps where input i is leaf i.
std::vector<int> tree_steps(int leaves);

// The arithmetic of a reduction.
struct ReductionSpec {
  DataType type = DataType::f32;
  Reduction reduction = Reduction::sum;
  bool round_each = false;      // 16-bit floats: round at every node, not once
  double divisor = 1;           // of the result (AVG)
  std::vector<double> factors;  // of each input (PREMUL_SUM), or empty
  // Nodes of a tree that several hosts reduce: 16-bit floats that are rounded once, at the root,
  // are float32 below it. `wide_inputs`: which inputs are (empty: none are).
  std::vector<bool> wide_inputs;
  bool wide_result = false;  // not with a divisor
};

class TreeReducer {
 public:
  TreeReducer(std::vector<int> steps, ReductionSpec spec);

  // outputs[j][i] = the reduction of inputs[0][i], inputs[1][i], ...; outputs may be inputs.
  // `bypass_caches`: outputs after the first are written with non-temporal stores, because
  // other cores read them next.
  void run(const std::vector<const char*>& inputs, const std::vector<char*>& outputs, size_t count,
           bool bypass_caches = false) const;

 private:
  void reduce_block(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
                    size_t begin, size_t count, bool bypass_caches, char* scratch) const;
  bool is_wide(int number) const { return !spec_.wide_inputs.empty() && spec_.wide_inputs[number]; }
  const char* load_input(const char* input, int number, size_t begin, size_t count,
                         char* scratch) const;
  void write_outputs(const char* value, const std::vector<char*>& outputs, size_t begin,
                     size_t count, bool bypass_caches) const;

  std::vector<int> steps_;
  ReductionSpec spec_;
  DataType working_type_;  // in which values are combined
  DataType result_type_;
  Kernels::Combine combine_;
  size_t stack_depth_;
};

// Elements [begin, end) of a tensor: the part that one rank reduces for all ranks.
struct Slice {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Returns slice j of `count` elements of `item` bytes: whole cache lines, except at the end.
Slice slice_of(size_t count, int ranks, int j, size_t item);

// Whether the reduction is defined for the type.
bool is_supported(Reduction reduction, DataType type);

}  // namespace lockstep
