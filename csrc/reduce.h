// Arithmetic on blocks of memory: combining, widening, scaling.
//
// Each function exists three times, compiled for plain, AVX2 and AVX-512
// processors (NEON is in the plain one on Arm); `kernels()` picks at run time.
// Every one does the same operations in the same order on each element, and no
// multiply-add is ever fused, so all three give the same bits.
//
// Rules, where torch leaves a choice: integers wrap; a bool is 0 or 1 (SUM and MAX
// are "or", PRODUCT and MIN are "and"); MIN and MAX give NaN where any input is
// NaN; AVG of integers truncates toward zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep {

// As c10d::ReduceOp numbers them.
enum class Reduction : uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum };
constexpr int kReductions = 9;

enum class Type : uint8_t {
  f64, f32, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, boolean, c64, c128, bytes,
};
constexpr int kTypes = 16;  // `bytes` moves, but is not computed with

size_t bytes_of(Type type);
inline bool is_half(Type type) { return type == Type::f16 || type == Type::bf16; }
// 16-bit floats are added in float32.
inline Type accumulator(Type type) { return is_half(type) ? Type::f32 : type; }

struct Kernels {
  // to[0], to[1], ... = a op b, `count` elements each; any of them may be a or b. All are
  // written at once: a sum for two ranks costs hardly more than one. nullptr: not defined.
  using Combine = void (*)(char* const* to, size_t copies, const void* a, const void* b,
                           size_t count);
  Combine combine[kReductions][kTypes];
  // The sum of 16-bit floats, rounded to 16 bits (as autograd accumulates).
  Combine add_rounded[2];                                             // f16, bf16
  void (*widen[2])(float* dst, const uint16_t* src, size_t count);    // f16, bf16
  void (*narrow[2])(uint16_t* dst, const float* src, size_t count);   // nearest, ties to even
  using Scale = void (*)(void* dst, const void* src, double by, size_t count);
  Scale multiply[kTypes];  // floating-point and complex types only
  Scale divide[kTypes];
  // memcpy for messages: the library's may use "rep movsb", which some processors run
  // ten times slower where the two lie alike within their pages, as ours often do.
  void (*copy)(void* dst, const void* src, size_t bytes);
  // The same past the caches, for memory that another core read last and reads next:
  // a line that it holds need not be fetched back first (4 to 12 times faster here).
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
const Kernels* kernels_named(const char* name);  // nullptr where this processor can't

}  // namespace lockstep
