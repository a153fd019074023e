// The kernels of gemm.h and the headers that it includes for any processor; on Arm products
// use NEON.
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "gemm.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VECTOR_BYTES 16
namespace lockstep::plain {
#include "exponential.inc"
#include "functions.inc"
#include "gemm.inc"
#include "layer_norm.inc"
#include "lstm_cell.inc"
#include "softmax.inc"

#include "direct_convolution.inc"  // with the vectors of gemm.inc
}  // namespace lockstep::plain
