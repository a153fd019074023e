// Convolutions of several images, each of which has a lane of a vector; see direct_convolution.h.
#pragma once

#include <cstdint>

#include "unfolding.h"

namespace lockstep {

// Computes the results of the first images, and returns of how many. It is 0 if they are too few,
// or too large.
//
// `adds_zero`: to the results, so that -0 becomes 0.
template <typename T>
int64_t convolve_lanes(const ConvolutionShape& shape, const T* input, const T* weight, T* result,
                       bool adds_zero, int64_t threads);
// The same for the gradient of the input, from that of the result.
template <typename T>
int64_t compute_input_gradient_lanes(const ConvolutionShape& shape, const T* gradient,
                                     const T* weight, T* result, int64_t threads);

}  // namespace lockstep
