// Adding n inputs along the tree, element by element, in one pass over memory.
//
//     node(lo, hi) = node(lo, mid) + node(mid, hi)
//     mid - lo     = the largest power of two below hi - lo
//
// The tree is a list of steps for a stack: push an input, or combine the two on
// top. It runs on blocks small enough that all scratch stays in the first-level
// cache, so each input is read once from memory and each output written once.
// The order depends on the number of leaves alone: the same bits on every rank.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "reduce.h"

namespace lockstep {

constexpr int kCombine = -1;

// Steps over inputs 0, 1, ... that are the nodes [lo, hi) in `nodes`, together all leaves.
// Nodes that are not `present` are left out of the sum (an empty list: all present).
std::vector<int> tree_steps(const std::vector<std::pair<int, int>>& nodes, int leaves,
                            const std::vector<bool>& present = {});
// The same where input i is leaf i.
std::vector<int> tree_steps(int leaves);

// What happens to the elements besides the order.
struct Arithmetic {
  Type type = Type::f32;
  Reduction reduction = Reduction::sum;
  bool round_each = false;      // 16-bit floats: round at every node, not once
  double divisor = 1;           // of the result
  std::vector<double> factors;  // of each input (premultiplied sum), or empty
};

class Fold {
 public:
  Fold(std::vector<int> steps, Arithmetic arithmetic);

  // outputs[j][i] = the fold of inputs[0][i], inputs[1][i], ...; outputs may be inputs.
  // `past_caches`: outputs after the first are stages, which other cores read next.
  void run(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
           size_t count, bool past_caches = false) const;

 private:
  void block(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
             size_t begin, size_t count, bool past_caches, char* scratch) const;
  const char* pushed(const char* input, int number, size_t count, char* room) const;
  void finish(const char* value, const std::vector<char*>& outputs, size_t begin, size_t count,
              bool past_caches) const;

  std::vector<int> steps_;
  Arithmetic arithmetic_;
  Type working_;              // the type in which it is combined
  Kernels::Combine combine_;
  size_t depth_;              // of the stack
};

// Elements [begin, end) of a tensor: what one rank combines for all.
struct Slice {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// Slice j of `count` elements of `item` bytes: whole cache lines, except at the end.
Slice slice_of(size_t count, int ranks, int j, size_t item);

// Whether the reduction is defined for the type.
bool supports(Reduction reduction, Type type);

}  // namespace lockstep
