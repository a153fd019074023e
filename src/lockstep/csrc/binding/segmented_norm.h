// Batch norm in training for several micro-batches, each of which has its own statistics.
//
//     rows of the micro-batches      0 0 0 0   1 1 1 1   2 2 2 2
//     their mean and deviation       (C)       (C)       (C)         one tensor, (3 * C)
//     the running mean after them    (C)       (C)       (C)         from that of the step
//
// So autograd keeps what the backward pass of each micro-batch needs in a tensor with rows.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "call_tensors.h"

namespace lockstep {

// The running means and variances that micro-batches have changed.
struct RunningStatistics {
  TensorMap<std::vector<at::Tensor>> parts;  // after each micro-batch, by that before them
  std::unordered_set<const c10::StorageImpl*> storages;
  int64_t count = 0;

  // Returns the tensor of each micro-batch, which begins as a copy.
  std::vector<at::Tensor> take(const at::Tensor& running, int64_t segments);
  // Returns whether a tensor shares memory with one of them.
  bool have(const at::Tensor& tensor) const;
};

// Calls batch norm for the rows of each micro-batch. The running statistics of the step stay; those
// of the micro-batches continue with those in `statistics`, or are added there.
void call_batch_norm(Stack* stack, int64_t segments, RunningStatistics& statistics);

// If an operator is batch norm in training, or its backward operator, for several micro-batches,
// calls it for the rows of each, adds gradients of weights in any order, and returns true.
// Otherwise returns false, and calls nothing.
//
// `alone`: the shapes of its tensors for one micro-batch.
bool try_batch_norm(const c10::OperatorHandle& op, Stack* stack,
                    const std::vector<std::vector<int64_t>>& alone, RunningStatistics& statistics);

}  // namespace lockstep
