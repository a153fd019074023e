// sqrt, asin, acos, atan, tan, and pow(x, 0.5), which is sqrt, in float32 and float64.
//
// torch computes them with MKL, whose code starts from an approximate instruction of the processor
// (rsqrtps, rcpps): AMD and Intel approximate with other bits, in every mode of MKL. An emulator
// computes these instructions exactly, so functions that use them have other bits there.
#include <ATen/CPUFunctions.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/atan2.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>
#include <torch/library.h>

#include <cmath>

#include "portable_kernels.h"

namespace lockstep {
namespace portable {

using at::Scalar;
using at::Tensor;

// ---- square roots ----

// The instruction of the processor rounds correctly.
template <typename T>
static void take_roots(const T* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = std::sqrt(from[i]);
}

template <typename T>
static void take_roots(at::TensorIterator& iterator) {
  iterator.for_each([](char** data, const int64_t* strides, int64_t count) {
    if (strides[0] == sizeof(T) && strides[1] == sizeof(T)) {
      take_roots(reinterpret_cast<const T*>(data[1]), reinterpret_cast<T*>(data[0]), count);
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      *reinterpret_cast<T*>(data[0] + i * strides[0]) =
          std::sqrt(*reinterpret_cast<const T*>(data[1] + i * strides[1]));
  });
}

// `result` is the tensor to write, or undefined: then it is created.
static Tensor take_roots(const Tensor& self, Tensor result) {
  at::TensorIterator iterator = at::TensorIterator::unary_float_op(result, self);
  self.scalar_type() == at::kFloat ? take_roots<float>(iterator) : take_roots<double>(iterator);
  return iterator.output();
}

// ---- the functions of a dense tensor of floats ----

static Tensor compute_leg(const Tensor& x) {  // sqrt(1 - x^2), without cancellation near 1
  return take_roots((1 - x).mul_(1 + x), {});
}

static Tensor compute_sqrt(const Tensor& x) { return take_roots(x, {}); }
static Tensor compute_asin(const Tensor& x) { return at::atan2(x, compute_leg(x)); }
static Tensor compute_acos(const Tensor& x) { return at::atan2(compute_leg(x), x); }
static Tensor compute_atan(const Tensor& x) { return at::atan2(x, at::ones_like(x)); }
static Tensor compute_tan(const Tensor& x) { return at::sin(x).div_(at::cos(x)); }

// ---- the operators ----

// Whether torch calls MKL for a tensor; it computes other types, and has the messages of errors.
static bool is_covered(const Tensor& self) {
  return (self.scalar_type() == at::kFloat || self.scalar_type() == at::kDouble) &&
         self.device().is_cpu() && self.layout() == at::kStrided && !self.is_neg();
}

// Integers as the floats that torch computes with. Vector instructions compute dense tensors only.
static Tensor prepare(const Tensor& self) {
  const bool is_integral = at::isIntegralType(self.scalar_type(), true);
  const Tensor floats = is_integral ? self.to(at::get_default_dtype_as_scalartype()) : self;
  if (floats.is_non_overlapping_and_dense()) return floats;
  return floats.clone(at::MemoryFormat::Preserve);  // dense, in the same order of dimensions
}

// Writes a result as torch does, which resizes `out`, converts to its type, or refuses it.
static Tensor& write(const Tensor& result, const Tensor& self, Tensor& out) {
  at::TensorIterator iterator = at::TensorIterator::unary_float_op(out, self);
  iterator.cast_outputs();  // resizes an output of another type, too
  return out.copy_(result);
}

#define DEFINE(NAME)                                                                              \
  static Tensor NAME(const Tensor& self) {                                                        \
    const Tensor prepared = prepare(self);                                                        \
    return is_covered(prepared) ? compute_##NAME(prepared) : at::cpu::NAME(self);                 \
  }                                                                                               \
  static Tensor& NAME##_out(const Tensor& self, Tensor& out) {                                    \
    const Tensor prepared = prepare(self);                                                        \
    if (!is_covered(prepared)) return at::cpu::NAME##_outf(self, out);                            \
    return write(compute_##NAME(prepared), self, out);                                            \
  }                                                                                               \
  static Tensor& NAME##_in_place(Tensor& self) {                                                  \
    return is_covered(self) ? self.copy_(compute_##NAME(prepare(self))) : at::cpu::NAME##_(self); \
  }

DEFINE(sqrt)
DEFINE(asin)
DEFINE(acos)
DEFINE(atan)
DEFINE(tan)

static bool is_root(const Tensor& self, const Scalar& exponent) {
  if (exponent.isComplex() || exponent.toDouble() != 0.5) return false;
  return is_covered(self) || at::isIntegralType(self.scalar_type(), false);
}

static Tensor pow(const Tensor& self, const Scalar& exponent) {
  return is_root(self, exponent) ? portable::sqrt(self) : at::cpu::pow(self, exponent);
}

static Tensor& pow_out(const Tensor& self, const Scalar& exponent, Tensor& out) {
  return is_root(self, exponent) ? portable::sqrt_out(self, out)
                                 : at::cpu::pow_outf(self, exponent, out);
}

static Tensor& pow_in_place(Tensor& self, const Scalar& exponent) {
  return is_root(self, exponent) ? portable::sqrt_in_place(self) : at::cpu::pow_(self, exponent);
}

// ---- products and quotients of complex numbers ----

// Vector instructions compute the elements at the borders of threads otherwise. Those of other
// numbers are rounded once.
static bool are_complex(const Tensor& a, const Tensor& b) {
  return a.is_complex() || b.is_complex();
}

#define DEFINE_ARITHMETIC(NAME)                                              \
  static Tensor NAME(const Tensor& a, const Tensor& b) {                     \
    const OneThread guard(are_complex(a, b));                                \
    return at::cpu::NAME(a, b);                                              \
  }                                                                          \
  static Tensor& NAME##_out(const Tensor& a, const Tensor& b, Tensor& out) { \
    const OneThread guard(are_complex(a, b));                                \
    return at::cpu::NAME##_outf(a, b, out);                                  \
  }                                                                          \
  static Tensor& NAME##_in_place(Tensor& a, const Tensor& b) {               \
    const OneThread guard(are_complex(a, b));                                \
    return at::cpu::NAME##_(a, b);                                           \
  }

DEFINE_ARITHMETIC(mul)
DEFINE_ARITHMETIC(div)

}  // namespace portable

void register_functions(torch::Library& library) {
#define REGISTER(NAME)                               \
  library.impl(#NAME, &portable::NAME);              \
  library.impl(#NAME ".out", &portable::NAME##_out); \
  library.impl(#NAME "_", &portable::NAME##_in_place);
  REGISTER(sqrt)
  REGISTER(asin)
  REGISTER(acos)
  REGISTER(atan)
  REGISTER(tan)
#define REGISTER_ARITHMETIC(NAME)                    \
  library.impl(#NAME ".Tensor", &portable::NAME);    \
  library.impl(#NAME ".out", &portable::NAME##_out); \
  library.impl(#NAME "_.Tensor", &portable::NAME##_in_place);
  REGISTER_ARITHMETIC(mul)
  REGISTER_ARITHMETIC(div)
  library.impl("pow.Tensor_Scalar", &portable::pow);
  library.impl("pow.Tensor_Scalar_out", &portable::pow_out);
  library.impl("pow_.Scalar", &portable::pow_in_place);
}

}  // namespace lockstep
