// Arithmetic on arrays: combining, widening, scaling, copying.
//
// Each kernel is compiled three times: for any processor ("plain"; uses NEON on Arm), for
// AVX2 and for AVX-512. `kernels()` selects one set at run time. All of them do the same
// operations in the same order on each element, and multiply-adds are never fused, so all
// three give the same bits.
//
// Where torch does not define the result: integers wrap; a bool is 0 or 1 (SUM and MAX are
// "or", PRODUCT and MIN are "and"); MIN and MAX return NaN if any input is NaN; AVG of
// integers truncates toward zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

// The numbers of c10d::ReduceOp.
enum class Reduction : uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
constexpr int kReductions = 9;

enum class DataType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  boolean,
  c64,
  c128,
  bytes,
};
constexpr int kDataTypes = 16;  // `bytes` can be moved, but not reduced

size_t element_size(DataType type);
inline bool is_half(DataType type) { return type == DataType::f16 || type == DataType::bf16; }
// The type in which a type is combined: 16-bit floats are added in float32.
inline DataType accumulation_type(DataType type) { return is_half(type) ? DataType::f32 : type; }

struct Kernels {
  // to[0], to[1], ... = a op b, `count` elements each; any of them may be a or b. All are
  // written in one pass, so a sum for two ranks costs little more than for one. nullptr if
  // the reduction is not defined for the type.
  using Combine = void (*)(char* const* to, size_t copies, const void* a, const void* b,
                           size_t count);
  Combine combine[kReductions][kDataTypes];
  // The sum of 16-bit floats, rounded to 16 bits (as autograd accumulates).
  Combine add_rounded[2];                                            // f16, bf16
  void (*widen[2])(float* dst, const uint16_t* src, size_t count);   // f16, bf16
  void (*narrow[2])(uint16_t* dst, const float* src, size_t count);  // nearest, ties to even
  using Scale = void (*)(void* dst, const void* src, double by, size_t count);
  Scale multiply[kDataTypes];  // floating-point and complex types only
  Scale divide[kDataTypes];
  // memcpy for messages. glibc's may use "rep movsb", which is ten times slower on some
  // processors if source and destination have similar page offsets, as ours often do.
  void (*copy)(void* dst, const void* src, size_t bytes);
  // The same with non-temporal stores, which bypass the caches: for memory that another
  // core read last and reads next. A line that is in that core's cache need not be fetched
  // first (measured 4 to 12 times faster).
  void (*stream)(void* dst, const void* src, size_t bytes);
  const char* name;
};

const Kernels& kernels();
inline void copy_bytes(void* dst, const void* src, size_t bytes) {
  kernels().copy(dst, src, bytes);
}
inline void stream_bytes(void* dst, const void* src, size_t bytes) {
  kernels().stream(dst, src, bytes);
}
// Copies a result, with non-temporal stores if it will not stay in the caches.
inline void copy_result(void* dst, const void* src, size_t bytes, bool bypass_caches) {
  (bypass_caches ? stream_bytes : copy_bytes)(dst, src, bytes);
}
const Kernels* find_kernels(const char* name);  // nullptr if not supported here

}  // namespace lockstep
