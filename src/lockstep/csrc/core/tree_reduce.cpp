#include "tree_reduce.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "errors.h"
#include "layout.h"
#include "sync.h"

namespace lockstep {

constexpr size_t kBlockBytes = 4096;  // of one operand in the L1 cache

static int split_point(int lo, int hi) {
  int width = 1;
  while (2 * width < hi - lo) width *= 2;
  return lo + width;
}

// Appends the steps for the subtree [lo, hi). Returns whether any of its nodes is present.
static bool append_steps(const std::vector<std::pair<int, int>>& nodes,
                         const std::vector<bool>& present, int lo, int hi,
                         std::vector<int>& steps) {
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i] == std::make_pair(lo, hi)) {
      if (!present.empty() && !present[i]) return false;
      steps.push_back(static_cast<int>(i));
      return true;
    }
  if (hi - lo < 2)
    throw UsageError("the nodes of the tree do not cover leaf " + std::to_string(lo));
  const int mid = split_point(lo, hi);
  const bool left = append_steps(nodes, present, lo, mid, steps);
  const bool right = append_steps(nodes, present, mid, hi, steps);
  if (left && right) steps.push_back(kCombine);
  return left || right;
}

std::vector<int> tree_steps(const std::vector<std::pair<int, int>>& nodes, int leaves,
                            const std::vector<bool>& present) {
  std::vector<int> steps;
  append_steps(nodes, present, 0, leaves, steps);
  return steps;
}

std::vector<int> tree_steps(int leaves) {
  std::vector<std::pair<int, int>> nodes;
  for (int leaf = 0; leaf < leaves; ++leaf) nodes.emplace_back(leaf, leaf + 1);
  return tree_steps(nodes, leaves);
}

Slice slice_of(size_t count, int ranks, int j, size_t item) {
  const size_t line = kCacheLine / item;
  const size_t width = ((count + ranks - 1) / ranks + line - 1) / line * line;
  return {std::min(count, width * j), std::min(count, width * (j + 1))};
}

bool is_supported(Reduction reduction, DataType type) {
  if (type == DataType::bytes) return false;
  const int t = static_cast<int>(accumulation_type(type));
  // Integers cannot be multiplied by a fraction, and bools have no average.
  if (reduction == Reduction::premul_sum) return kernels().multiply[t] != nullptr;
  if (reduction == Reduction::avg) return kernels().divide[t] != nullptr;
  return kernels().combine[static_cast<int>(reduction)][t] != nullptr;
}

TreeReducer::TreeReducer(std::vector<int> steps, ReductionSpec spec)
    : steps_(std::move(steps)), spec_(std::move(spec)) {
  const bool rounded = spec_.round_each && is_half(spec_.type);
  working_type_ = rounded ? spec_.type : accumulation_type(spec_.type);
  result_type_ = spec_.wide_result ? working_type_ : spec_.type;
  combine_ =
      rounded
          ? kernels().add_rounded[spec_.type == DataType::bf16]
          : kernels().combine[static_cast<int>(spec_.reduction)][static_cast<int>(working_type_)];
  size_t height = 0;
  stack_depth_ = 0;
  for (int step : steps_) {
    height = step == kCombine ? height - 1 : height + 1;
    stack_depth_ = std::max(stack_depth_, height);
  }
}

void TreeReducer::run(const std::vector<const char*>& inputs, const std::vector<char*>& outputs,
                      size_t count, bool bypass_caches) const {
  const size_t width =
      kBlockBytes / std::max(element_size(working_type_), element_size(spec_.type));
  alignas(kCacheLine) static thread_local char small_scratch[8 * kBlockBytes];
  std::unique_ptr<char[]> large_scratch;
  char* scratch = small_scratch;
  if (stack_depth_ + 1 > 8) {
    large_scratch.reset(new char[(stack_depth_ + 1) * kBlockBytes]);
    scratch = large_scratch.get();
  }
  for (size_t begin = 0; begin < count; begin += width)
    reduce_block(inputs, outputs, begin, std::min(width, count - begin), bypass_caches, scratch);
}

const char* TreeReducer::load_input(const char* input, int number, size_t begin, size_t count,
                                    char* scratch) const {
  const bool is_narrow = working_type_ != spec_.type && !is_wide(number);
  const char* value = input + begin * element_size(is_narrow ? spec_.type : working_type_);
  if (is_narrow) {
    kernels().widen[spec_.type == DataType::bf16](reinterpret_cast<float*>(scratch),
                                                  reinterpret_cast<const uint16_t*>(value), count);
    value = scratch;
  }
  if (!spec_.factors.empty()) {
    kernels().multiply[static_cast<int>(working_type_)](scratch, value, spec_.factors[number],
                                                        count);
    value = scratch;
  }
  return value;
}

void TreeReducer::reduce_block(const std::vector<const char*>& inputs,
                               const std::vector<char*>& outputs, size_t begin, size_t count,
                               bool bypass_caches, char* scratch) const {
  const size_t item = element_size(result_type_);
  const char* stack[33];  // a tree of 2^31 leaves has a height of 32
  size_t height = 0;
  // The last step writes to the outputs directly, if no conversion follows.
  const bool is_direct = working_type_ == result_type_ && spec_.divisor == 1;
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (steps_[i] != kCombine) {
      stack[height] =
          load_input(inputs[steps_[i]], steps_[i], begin, count, scratch + height * kBlockBytes);
      ++height;
      continue;
    }
    --height;
    char* to = scratch + (height - 1) * kBlockBytes;
    if (i + 1 == steps_.size() && is_direct) {
      char* all[kMaxRanks];
      const size_t copies = bypass_caches ? 1 : outputs.size();
      for (size_t k = 0; k < copies; ++k) all[k] = outputs[k] + begin * item;
      combine_(all, copies, stack[height - 1], stack[height], count);
      if (copies == outputs.size()) return;
      to = all[0];
    } else {
      combine_(&to, 1, stack[height - 1], stack[height], count);
    }
    stack[height - 1] = to;
  }
  write_outputs(stack[0], outputs, begin, count, bypass_caches);
}

void TreeReducer::write_outputs(const char* value, const std::vector<char*>& outputs, size_t begin,
                                size_t count, bool bypass_caches) const {
  const size_t item = element_size(result_type_);
  char* first = outputs[0] + begin * item;
  if (spec_.divisor != 1) {
    const bool half = is_half(spec_.type);
    float wide[kBlockBytes / sizeof(uint16_t)];
    if (half && working_type_ == spec_.type) {
      kernels().widen[spec_.type == DataType::bf16](wide, reinterpret_cast<const uint16_t*>(value),
                                                    count);
      value = reinterpret_cast<const char*>(wide);
    }
    char* to = half ? reinterpret_cast<char*>(wide) : first;
    kernels().divide[static_cast<int>(half ? DataType::f32 : working_type_)](to, value,
                                                                             spec_.divisor, count);
    value = to;
    if (half) {
      kernels().narrow[spec_.type == DataType::bf16](reinterpret_cast<uint16_t*>(first), wide,
                                                     count);
      value = first;
    }
  } else if (working_type_ != result_type_) {
    kernels().narrow[spec_.type == DataType::bf16](reinterpret_cast<uint16_t*>(first),
                                                   reinterpret_cast<const float*>(value), count);
    value = first;
  }
  for (char* output : outputs)
    if (output + begin * item != value)
      (bypass_caches && output != outputs[0] ? stream_bytes : copy_bytes)(output + begin * item,
                                                                          value, count * item);
}

}  // namespace lockstep
