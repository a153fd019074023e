// Gradients of the weight and the bias of layer norm, one row after the other:
//
//     of_weight[j] = fma(gradient[j], fma(inverse, input[j], -inverse * mean), of_weight[j])
//     of_bias[j]  += gradient[j]
//
// These are the steps of torch's kernel in one thread. A column is computed by itself.
#pragma once

#include <cstdint>

namespace lockstep {

struct NormRows {
  int64_t rows, columns, pitch;  // rows lie `pitch` elements apart
  const float *gradient, *input;
  const float *means, *inverses;  // of the rows; an inverse is 1 / deviation
};

// Adds rows to gradients, of which those that are nullptr are not needed.
using AddNormRows = void (*)(const NormRows& rows, float* of_weight, float* of_bias);

}  // namespace lockstep
