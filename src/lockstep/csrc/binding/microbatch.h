// What a step does after each unit and micro-batch of a model, where Python would take as long as
// the arithmetic of a small one.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace lockstep {

using Gradients = std::vector<std::optional<at::Tensor>>;  // one per parameter

// Seeds torch's default generator of the CPU with the key that begins with `prefix` (int64 values)
// and ends with `unit` and, unless it is 0, `call`. Returns the seed.
uint64_t seed_generator(std::string_view prefix, int64_t unit, int64_t call);

// Moves the gradients of a micro-batch out of `.grad`, and adds them to its left siblings in the
// tree, innermost first: each sum is stored in the gradients of the left sibling, the last one in
// `outs` where there is one. Returns the sums.
//
// Returns nothing, and changes nothing, unless all gradients have the dtype and the strides of
// their parameters, and all siblings have gradients of the same parameters.
std::optional<Gradients> accumulate_gradients(const std::vector<at::Tensor>& parameters,
                                              const std::vector<Gradients>& siblings,
                                              const Gradients& outs);

}  // namespace lockstep
