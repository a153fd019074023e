// The kernels of gemm.h and the headers that it includes for x86 processors with AVX-512.
// The headers are included before the target is set, so that no shared inline function is compiled
// for it.
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif
#define VECTOR_BYTES 64
namespace lockstep::avx512 {
#include "exponential.inc"
#include "functions.inc"
#include "gemm.inc"
#include "layer_norm.inc"
#include "lstm_cell.inc"
#include "softmax.inc"

#include "direct_convolution.inc"  // with the vectors of gemm.inc
}  // namespace lockstep::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
