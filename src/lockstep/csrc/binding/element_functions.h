// Operators of torch that functions.h computes in float32: any division among threads, and any
// place in a tensor, gives the same bits.
//
// torch computes some of them with MKL, which is slow if its bits are to be the same on every
// processor, and the others with vector instructions except for the last elements.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace lockstep {

// `out`: the tensor to write, or undefined. Returns the result; undefined for other types.
using ElementFunction = at::Tensor (*)(const c10::ArrayRef<c10::IValue>& arguments,
                                       at::Tensor& out);

// Returns the function of an operator, by its name without namespace; nullptr if it has none.
ElementFunction find_element_function(const std::string& name);

at::Tensor call_element_function(ElementFunction function,
                                 const c10::ArrayRef<c10::IValue>& arguments, at::Tensor out);

}  // namespace lockstep
