// The kernels for x86 processors with AVX2. The headers are included before the target
// is set, so that no shared inline function is compiled for it.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define VECTOR_BYTES 32
namespace lockstep::avx2 {
#include "kernels.inc"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
