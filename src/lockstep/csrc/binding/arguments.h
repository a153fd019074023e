// Checks of the lists of tensors that callers pass, in the words of torch's own backends.
//
// `op` is the call, for messages. All throw ArgumentError.
#pragma once

#include "tensors.h"

namespace lockstep {

// Returns the tensor of a list that must have one; `role` is "", "input " or "output ".
const at::Tensor& single(const char* op, const Tensors& tensors, const char* role = "");
// Returns the list of a list that must have one, with a tensor for each of n ranks.
const Tensors& single(const char* op, const std::vector<Tensors>& lists, const char* role, int n);

// Throws unless the list has tensors, and all have the layout, dtype and shape of the first.
void check_alike(const char* op, const Tensors& tensors);
void check_dtypes(const char* op, const at::Tensor& a, const at::Tensor& b);
// Throws unless the list has a tensor for each of n ranks, with the dtype of the model.
void check_list(const char* op, const char* role, const Tensors& list, const at::Tensor& model,
                int n);
void check_root_tensor(const char* op, int64_t index, const Tensors& tensors);

}  // namespace lockstep
