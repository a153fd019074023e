// Batch norm in training for several micro-batches, each of which has its own statistics.
//
//     rows of the micro-batches      0 0 0 0   1 1 1 1   2 2 2 2
//     their mean and deviation       (C)       (C)       (C)         one tensor, (3 * C)
//     the running mean after them    (C)       (C)       (C)         from that of the step
//
// So autograd keeps what the backward pass of each micro-batch needs in a tensor with rows.
#pragma once

#include <cstdint>
#include <vector>

#include "call_tensors.h"

namespace lockstep {

// The running mean or variance after each micro-batch, by that before them.
using RunningStatistics = TensorMap<std::vector<at::Tensor>>;

// Calls batch norm for the rows of each micro-batch. The running statistics of the step stay; those
// of the micro-batches continue with entries of `statistics`, or become entries.
void call_batch_norm(Stack* stack, int64_t segments, RunningStatistics& statistics);

// If an operator is batch norm in training, or its backward operator, for several micro-batches,
// calls it for the rows of each, adds gradients of weights in any order, and returns true.
// Otherwise returns false, and calls nothing.
//
// `alone`: the shapes of its tensors for one micro-batch.
bool try_batch_norm(const c10::OperatorHandle& op, Stack* stack,
                    const std::vector<std::vector<int64_t>>& alone, RunningStatistics& statistics);

}  // namespace lockstep
