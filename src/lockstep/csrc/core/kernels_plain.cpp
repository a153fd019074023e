// The kernels for any processor; on Arm the compiler uses NEON.
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define VECTOR_BYTES 16
namespace lockstep::plain {
#include "kernels.inc"
}
