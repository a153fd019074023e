// Losses of several micro-batches, each of which has one.
//
//     rows of the micro-batches      0 0 0 0   1 1 1 1   2 2 2 2
//     their losses                   one tensor, (3)
//
// So a loss has one row per micro-batch, also that of a single one, whose shape is (1).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "call_tensors.h"

namespace lockstep {

// Returns whether samples, given the gradient of their mean or sum, get the same from a tensor with
// an element for each as from torch's, one number that is expanded: if it is multiplied, divided or
// selected next. Other kernels round some elements by their place in memory.
bool takes_elements(const at::Tensor& samples);

// Returns whether an operator computes a loss from samples, and from targets without gradients: a
// mean of all elements, or their sum.
bool is_loss(const c10::OperatorHandle& op, const Stack& stack);

// Returns whether an operator computes from losses, one of which each micro-batch has, what it
// computes from each, a number: an element by itself, with numbers of the same type.
bool keeps_losses(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors,
                  TensorMap<bool>& losses);

// Calls the operator of a loss for the rows of each micro-batch.
//
// `slices`: the tensors with rows by their position, and the dimensions of these.
void call_loss(const c10::OperatorHandle& op, Stack* stack, int64_t segments,
               const std::vector<std::pair<size_t, int64_t>>& slices);

// If an operator computes a loss, or is the backward operator of one for several micro-batches,
// calls it for the rows of each, and returns true. Otherwise returns false, and calls nothing.
//
// `alone`: the shapes of its tensors for one micro-batch; nullptr if it is called for one.
bool try_loss(const c10::OperatorHandle& op, Stack* stack,
              const std::vector<std::vector<int64_t>>* alone, bool is_forward);

// Computes the gradients of all micro-batches in one call, given the arguments of
// nll_loss_backward, whose gradient of a sample is that of its micro-batch by the number of its
// samples; nothing if there is another mean.
std::vector<at::Tensor> try_nll_gradient(const c10::IValue* arguments, int64_t segments);

}  // namespace lockstep
