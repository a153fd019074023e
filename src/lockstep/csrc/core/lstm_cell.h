// What a step of an LSTM layer computes after its products, for some rows of a batch:
//
//     i, f, o = sigmoid(gates)    g = tanh(gates)
//     cell    = f * cell before + i * g
//     output  = o * tanh(cell)
//
// Functions are polynomials in fused multiply-adds, the same in every lane of a vector and after
// the last whole one. So the bits of an element depend on its operands only, as those of gemm.h.
// They are compiled with its kernels. Errors are below 3 units in the last place.
#pragma once

#include <cstdint>

namespace lockstep {

// Rows of a step. Each has `hidden` numbers of a kind, side by side, and begins `pitch` numbers
// after the one before.
struct CellRows {
  int64_t rows, hidden;
  // i, f, g, o, cell and tanh(cell). The first four are read as sums of products, and all written.
  float* state;
  int64_t state_pitch;
  const float* cell_before;
  int64_t cell_pitch;
  float* output;  // of rows side by side
};

// The gradients of a step. `output` and `cell` are those that the step after it has found, and
// become those for the step before it.
struct CellGradients {
  int64_t rows, hidden;
  const float* state;  // as above
  int64_t state_pitch;
  const float* cell_before;
  int64_t cell_pitch;
  const float* of_output;  // from the output of the layer
  int64_t of_output_pitch;
  const float* output;  // rows side by side, as all below
  float* cell;
  float* gates;  // of the sums of products
};

struct LstmCell {
  void (*compute)(const CellRows& rows);
  void (*differentiate)(const CellGradients& gradients);
};

}  // namespace lockstep
