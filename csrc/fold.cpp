#include "fold.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "failure.h"
#include "layout.h"
#include "sync.h"

namespace lockstep {

constexpr size_t kBlock = 4096;  // bytes of an operand in the first-level cache

static int split(int lo, int hi) {
  int width = 1;
  while (2 * width < hi - lo) width *= 2;
  return lo + width;
}

static bool visit(const std::vector<std::pair<int, int>>& nodes, const std::vector<bool>& present,
                  int lo, int hi, std::vector<int>& steps) {
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i] == std::make_pair(lo, hi)) {
      if (!present.empty() && !present[i]) return false;
      steps.push_back(static_cast<int>(i));
      return true;
    }
  if (hi - lo < 2) throw Misuse("the nodes of the tree do not cover leaf " + std::to_string(lo));
  const int mid = split(lo, hi);
  const bool left = visit(nodes, present, lo, mid, steps);
  const bool right = visit(nodes, present, mid, hi, steps);
  if (left && right) steps.push_back(kCombine);
  return left || right;
}

std::vector<int> tree_steps(const std::vector<std::pair<int, int>>& nodes, int leaves,
                            const std::vector<bool>& present) {
  std::vector<int> steps;
  visit(nodes, present, 0, leaves, steps);
  return steps;
}

std::vector<int> tree_steps(int leaves) {
  std::vector<std::pair<int, int>> nodes;
  for (int leaf = 0; leaf < leaves; ++leaf) nodes.emplace_back(leaf, leaf + 1);
  return tree_steps(nodes, leaves);
}

Slice slice_of(size_t count, int ranks, int j, size_t item) {
  const size_t line = kLine / item;
  const size_t width = ((count + ranks - 1) / ranks + line - 1) / line * line;
  return {std::min(count, width * j), std::min(count, width * (j + 1))};
}

bool supports(Reduction reduction, Type type) {
  if (type == Type::bytes) return false;
  const int t = static_cast<int>(accumulator(type));
  // A fraction of a whole number is none, and a bool has no average.
  if (reduction == Reduction::premul_sum) return kernels().multiply[t] != nullptr;
  if (reduction == Reduction::avg) return kernels().divide[t] != nullptr;
  return kernels().combine[static_cast<int>(reduction)][t] != nullptr;
}

Fold::Fold(std::vector<int> steps, Arithmetic arithmetic)
    : steps_(std::move(steps)), arithmetic_(std::move(arithmetic)) {
  const bool rounded = arithmetic_.round_each && is_half(arithmetic_.type);
  working_ = rounded ? arithmetic_.type : accumulator(arithmetic_.type);
  combine_ = rounded ? kernels().add_rounded[arithmetic_.type == Type::bf16]
                     : kernels().combine[static_cast<int>(arithmetic_.reduction)]
                                        [static_cast<int>(working_)];
  size_t height = 0;
  depth_ = 0;
  for (int step : steps_) {
    height = step == kCombine ? height - 1 : height + 1;
    depth_ = std::max(depth_, height);
  }
}

void Fold::run(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
               size_t count, bool past_caches) const {
  const size_t width = kBlock / std::max(bytes_of(working_), bytes_of(arithmetic_.type));
  alignas(kLine) static thread_local char own[8 * kBlock];
  std::unique_ptr<char[]> more;
  char* scratch = own;
  if (depth_ + 1 > 8) {
    more.reset(new char[(depth_ + 1) * kBlock]);
    scratch = more.get();
  }
  for (size_t begin = 0; begin < count; begin += width)
    block(inputs, outputs, begin, std::min(width, count - begin), past_caches, scratch);
}

const char* Fold::pushed(const char* input, int number, size_t count, char* room) const {
  const char* value = input;
  if (working_ != arithmetic_.type) {
    kernels().widen[arithmetic_.type == Type::bf16](
        reinterpret_cast<float*>(room), reinterpret_cast<const uint16_t*>(value), count);
    value = room;
  }
  if (!arithmetic_.factors.empty()) {
    kernels().multiply[static_cast<int>(working_)](room, value, arithmetic_.factors[number], count);
    value = room;
  }
  return value;
}

void Fold::block(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
                 size_t begin, size_t count, bool past_caches, char* scratch) const {
  const size_t item = bytes_of(arithmetic_.type);
  const char* stack[33];  // a tree of 2^31 leaves is 32 high
  size_t height = 0;
  // The last combination writes to its place, if nothing is left to be done there.
  const bool direct = working_ == arithmetic_.type && arithmetic_.divisor == 1;
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i] != kCombine) {
      stack[height] = pushed(inputs[steps_[i]] + begin * item, steps_[i], count,
                             scratch + height * kBlock);
      ++height;
      continue;
    }
    --height;
    char* to = scratch + (height - 1) * kBlock;
    if (i + 1 == steps_.size() && direct) {
      char* all[kMaxRanks];
      const size_t copies = past_caches ? 1 : outputs.size();
      for (size_t k = 0; k < copies; ++k) all[k] = outputs[k] + begin * item;
      combine_(all, copies, stack[height - 1], stack[height], count);
      if (copies == outputs.size()) return;
      to = all[0];
    } else {
      combine_(&to, 1, stack[height - 1], stack[height], count);
    }
    stack[height - 1] = to;
  }
  finish(stack[0], outputs, begin, count, past_caches);
}

void Fold::finish(const char* value, const std::vector<char*>& outputs, size_t begin,
                  size_t count, bool past_caches) const {
  const size_t item = bytes_of(arithmetic_.type);
  char* first = outputs[0] + begin * item;
  if (arithmetic_.divisor != 1) {
    const bool half = is_half(arithmetic_.type);
    float wide[kBlock / sizeof(uint16_t)];
    if (half && working_ == arithmetic_.type) {
      kernels().widen[arithmetic_.type == Type::bf16](
          wide, reinterpret_cast<const uint16_t*>(value), count);
      value = reinterpret_cast<const char*>(wide);
    }
    char* to = half ? reinterpret_cast<char*>(wide) : first;
    kernels().divide[static_cast<int>(half ? Type::f32 : working_)](to, value, arithmetic_.divisor,
                                                                    count);
    value = to;
    if (half) {
      kernels().narrow[arithmetic_.type == Type::bf16](reinterpret_cast<uint16_t*>(first), wide,
                                                       count);
      value = first;
    }
  } else if (working_ != arithmetic_.type) {
    kernels().narrow[arithmetic_.type == Type::bf16](reinterpret_cast<uint16_t*>(first),
                                                     reinterpret_cast<const float*>(value), count);
    value = first;
  }
  for (char* output : outputs)
    if (output + begin * item != value)
      (past_caches && output != outputs[0] ? stream_bytes : copy_bytes)(output + begin * item, value,
                                                                        count * item);
}

}  // namespace lockstep
