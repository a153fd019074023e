// Elementwise functions of numbers in float32, in fused multiply-adds, divisions and exact steps:
// the bits of a result depend on its argument only, not on its place among others.
//
// Errors are below 3 units in the last place; those of GELU below 3 units of the argument, and
// those of gradients below 8 units of its size plus 1.
#pragma once

#include <cstdint>

namespace lockstep {

struct Functions {
  // Computes `count` numbers; `to` may be `from`.
  using Of = void (*)(const float* from, float* to, int64_t count);
  // Computes gradients of arguments from those of results; `to` may be `of_results`.
  using GradientOf = void (*)(const float* of_results, const float* from, float* to, int64_t count);

  Of exp, log, tanh, erf, sigmoid, silu, gelu, gelu_tanh;
  GradientOf tanh_gradient, sigmoid_gradient;  // `from` is the result of the function
  GradientOf silu_gradient, gelu_gradient, gelu_tanh_gradient;
};

}  // namespace lockstep
