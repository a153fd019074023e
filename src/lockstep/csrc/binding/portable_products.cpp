#include "portable_products.h"

#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "gemm.h"
#include "tensors.h"
#include "torch_errors.h"

namespace lockstep {

static const Gemm* chosen_gemm = nullptr;

constexpr int64_t kParallelWork = 1 << 17;  // multiply-adds for which a thread is worth starting
constexpr int64_t kLeastBlock = 64;         // rows or columns; smaller blocks pack too much

// ---- the threads ----

// Calls body(i) for i in 0 .. count-1 on torch's threads. at::parallel_for would need a compiler
// with OpenMP, and a second OpenMP runtime in the process; an iterator loops on the same threads.
static void run_parallel(int64_t count, int64_t grain, const std::function<void(int64_t)>& body) {
  if (count <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const at::Tensor numbers = at::detail::empty_cpu({count}, at::TensorOptions(at::kLong));
  std::iota(numbers.mutable_data_ptr<int64_t>(), numbers.mutable_data_ptr<int64_t>() + count, 0);
  at::TensorIteratorConfig config;
  config.add_input(numbers).check_all_same_dtype(false);
  at::TensorIterator iterator = config.build();
  iterator.for_each(
      [&](char** data, const int64_t* strides, int64_t size) {
        for (int64_t i = 0; i < size; ++i)
          body(*reinterpret_cast<const int64_t*>(data[0] + i * strides[0]));
      },
      grain);
}

// ---- products of tensors ----

// The operands of a batch of products, whose tensors have three dimensions. `c` may be undefined.
struct Batch {
  at::Tensor a, b, c, result;
  double beta, alpha;
};

static Operand operand_of(const at::Tensor& tensor, int64_t number) {
  if (!tensor.defined()) return {nullptr, 0, 0};
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  return {data + number * tensor.stride(0) * bytes, tensor.stride(1), tensor.stride(2)};
}

static void multiply(const Batch& batch) {
  const at::ScalarType type = batch.result.scalar_type();
  const int64_t products = batch.result.size(0), m = batch.result.size(1), n = batch.result.size(2),
                k = batch.a.size(2);
  int64_t rows = (m + kBlockRows - 1) / kBlockRows,
          columns = (n + kBlockColumns - 1) / kBlockColumns;
  const int64_t threads =
      std::min<int64_t>(at::get_num_threads(), products * m * n * k / kParallelWork + 1);
  while (products * rows * columns < threads) {
    const int64_t height = m / rows, width = n / columns;
    if (std::max(height, width) < 2 * kLeastBlock) break;
    ++(height > width ? rows : columns);
  }
  const int64_t height = (m + rows - 1) / rows, width = (n + columns - 1) / columns;
  const int64_t grain = std::max<int64_t>(1, kParallelWork / (height * width * k));
  run_parallel(products * rows * columns, grain, [&](int64_t task) {
    const int64_t number = task / (rows * columns), row = task / columns % rows * height,
                  column = task % columns * width;
    if (row >= m || column >= n) return;
    const Product product{data_type_of(type),
                          m,
                          n,
                          k,
                          operand_of(batch.a, number),
                          operand_of(batch.b, number),
                          operand_of(batch.c, number),
                          operand_of(batch.result, number),
                          batch.alpha,
                          batch.beta};
    chosen_gemm->multiply(
        take_block(product, row, std::min(height, m - row), column, std::min(width, n - column)));
  });
}

static bool is_covered(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type && tensor.device().is_cpu() &&
         tensor.layout() == at::kStrided && !tensor.is_neg();
}

static bool is_broadcastable(const at::Tensor& tensor, at::IntArrayRef sizes) {
  const auto missing = static_cast<int64_t>(sizes.size()) - tensor.dim();
  if (missing < 0) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) != 1 && tensor.size(i) != sizes[i + missing]) return false;
  return true;
}

static at::Tensor as_batch(const at::Tensor& tensor, bool is_vector) {
  const at::Tensor matrix = is_vector ? tensor.unsqueeze(-1) : tensor;
  return matrix.dim() == 2 ? matrix.unsqueeze(0) : matrix;
}

// Computes beta * c + alpha * (a b) and returns true; returns false, and changes nothing, if torch
// has to do it: for types and layouts that are not covered, products without a sum, and wrong
// arguments, for which torch has the messages.
//
// `c` may be null. `result` is the tensor to write, or undefined: then it is created.
static bool try_multiply(const at::Tensor* c, const at::Tensor& a, const at::Tensor& b,
                         const at::Scalar& beta, const at::Scalar& alpha, int64_t dimensions,
                         at::Tensor& result, bool is_in_place = false) {
  const at::ScalarType type = a.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16) return false;
  const bool is_vector = dimensions == 1;  // a matrix times a vector
  const int64_t rank = is_vector ? 2 : dimensions;
  if (!is_covered(a, type) || !is_covered(b, type) || (c && !is_covered(*c, type)) ||
      a.dim() != rank || b.dim() != dimensions || alpha.isComplex() || beta.isComplex())
    return false;
  if (a.size(-1) != b.size(is_vector ? 0 : -2) || (rank == 3 && a.size(0) != b.size(0)))
    return false;
  std::vector<int64_t> sizes(a.sizes().begin(), a.sizes().end() - 1);
  if (!is_vector) sizes.push_back(b.size(-1));
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (c && (is_in_place ? c->sizes() != at::IntArrayRef(sizes) : !is_broadcastable(*c, sizes)))
    return false;
  bool needs_copy = false;
  if (result.defined()) {
    if (!is_covered(result, type)) return false;
    at::native::resize_output(result, sizes);
    if (at::has_internal_overlap(result) == at::MemOverlap::Yes) return false;
    // In one memory with an operand, it could be overwritten before it is read.
    const bool is_c = c && c->data_ptr() == result.data_ptr() && c->sizes() == result.sizes() &&
                      c->strides() == result.strides();
    needs_copy =
        a.is_alias_of(result) || b.is_alias_of(result) || (c && !is_c && c->is_alias_of(result));
  }
  const at::Tensor written =
      result.defined() && !needs_copy ? result : at::detail::empty_cpu(sizes, a.options());
  Batch batch{as_batch(a, false), as_batch(b, is_vector), {}, as_batch(written, is_vector), 0,
              alpha.toDouble()};
  if (c && beta.toDouble() != 0) {
    batch.c = as_batch(c->expand(sizes), is_vector);
    batch.beta = beta.toDouble();
  }
  multiply(batch);
  if (needs_copy)
    result.copy_(written);
  else if (!result.defined())
    result = written;
  return true;
}

// ---- the kernels ----

using at::Scalar;
using at::Tensor;

// Three forms of an operator beta * self + alpha * (a b).
#define DEFINE_WITH_ADDEND(NAME, DIMENSIONS)                                                   \
  static Tensor NAME(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, \
                     const Scalar& alpha) {                                                    \
    Tensor result;                                                                             \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, result)) return result;             \
    return at::cpu::NAME(self, a, b, beta, alpha);                                             \
  }                                                                                            \
  static Tensor& NAME##_out(const Tensor& self, const Tensor& a, const Tensor& b,              \
                            const Scalar& beta, const Scalar& alpha, Tensor& out) {            \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, out)) return out;                   \
    return at::cpu::NAME##_outf(self, a, b, beta, alpha, out);                                 \
  }                                                                                            \
  static Tensor& NAME##_in_place(Tensor& self, const Tensor& a, const Tensor& b,               \
                                 const Scalar& beta, const Scalar& alpha) {                    \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, self, true)) return self;           \
    return at::cpu::NAME##_(self, a, b, beta, alpha);                                          \
  }

#define DEFINE_PRODUCT(NAME, DIMENSIONS)                                      \
  static Tensor NAME(const Tensor& a, const Tensor& b) {                      \
    Tensor result;                                                            \
    if (try_multiply(nullptr, a, b, 0, 1, DIMENSIONS, result)) return result; \
    return at::cpu::NAME(a, b);                                               \
  }                                                                           \
  static Tensor& NAME##_out(const Tensor& a, const Tensor& b, Tensor& out) {  \
    if (try_multiply(nullptr, a, b, 0, 1, DIMENSIONS, out)) return out;       \
    return at::cpu::NAME##_outf(a, b, out);                                   \
  }

namespace {
DEFINE_PRODUCT(mm, 2)
DEFINE_PRODUCT(bmm, 3)
DEFINE_WITH_ADDEND(addmm, 2)
DEFINE_WITH_ADDEND(baddbmm, 3)
DEFINE_WITH_ADDEND(addmv, 1)
}  // namespace

// torch warns of every operator whose kernel is replaced.
struct IgnoreWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void use_portable_products(bool enabled, const std::string& kernels) {
  static torch::Library* library = nullptr;  // never freed: threads may compute until the end
  delete library;
  library = nullptr;
  if (!enabled) return;
  chosen_gemm = kernels.empty() ? &gemm() : find_gemm(kernels.c_str());
  CHECK_ARGUMENT(chosen_gemm, "there are no kernels ", kernels, " for this processor");
  IgnoreWarnings ignore;
  const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
  library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library->impl("mm", &mm);
  library->impl("mm.out", &mm_out);
  library->impl("bmm", &bmm);
  library->impl("bmm.out", &bmm_out);
  library->impl("addmm", &addmm);
  library->impl("addmm.out", &addmm_out);
  library->impl("addmm_", &addmm_in_place);
  library->impl("baddbmm", &baddbmm);
  library->impl("baddbmm.out", &baddbmm_out);
  library->impl("baddbmm_", &baddbmm_in_place);
  library->impl("addmv", &addmv);
  library->impl("addmv.out", &addmv_out);
  library->impl("addmv_", &addmv_in_place);
}

}  // namespace lockstep
