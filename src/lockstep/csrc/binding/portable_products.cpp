// mm, bmm, addmm, baddbmm and addmv.
#include <ATen/CPUFunctions.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <torch/library.h>

#include <algorithm>

#include "gemm.h"
#include "portable_kernels.h"
#include "segment_sums.h"
#include "tensors.h"

namespace lockstep {

constexpr int64_t kLeastBlock = 64;  // rows or columns; smaller blocks pack too much

// A block of a sum along the tree, and the blocks that wait for another, are in the cache.
constexpr int64_t kSummedRows = 256, kSummedColumns = 256;
constexpr int kSumScratch = 3;

// ---- products of tensors ----

// An operand of a batch of products.
struct Operands {
  const char* data = nullptr;
  int64_t bytes = 0, stride = 0;  // of an element, and from one product to the next
  Operand first{};

  Operands() = default;
  // `sizes` is the shape that the tensor is expanded to; a vector is a matrix with one column.
  Operands(const at::Tensor& tensor, at::IntArrayRef sizes, bool is_vector)
      : data(static_cast<const char*>(tensor.const_data_ptr())),
        bytes(static_cast<int64_t>(tensor.element_size())) {
    const auto missing = static_cast<int64_t>(sizes.size()) - tensor.dim();
    int64_t strides[3] = {0, 0, 0};  // of products, rows and columns
    for (int64_t i = 0; i < tensor.dim(); ++i)
      strides[3 - is_vector - static_cast<int64_t>(sizes.size()) + missing + i] =
          tensor.size(i) == 1 && sizes[missing + i] != 1 ? 0 : tensor.stride(i);
    stride = strides[0];
    first = {data, strides[1], strides[2]};
  }
  Operand operator[](int64_t number) const {
    return {data + number * stride * bytes, first.row_stride, first.column_stride};
  }
};

struct Batch {
  at::ScalarType type;
  int64_t products, m, n, k;
  Operands a, b, c, result;  // c is read only if beta is not 0
  double beta, alpha;
};

// Divides the results of some products of m x n x k among threads, and calls
// body(number of the product, row, rows, column, columns) for each block. Where there are few
// blocks, each thread gets as many.
template <typename Body>
static void for_each_block(int64_t products, int64_t m, int64_t n, int64_t k,
                           int64_t largest_height, int64_t largest_width, const Body& body) {
  int64_t rows = (m + largest_height - 1) / largest_height,
          columns = (n + largest_width - 1) / largest_width;
  const int64_t threads =
      std::min<int64_t>(at::get_num_threads(), products * m * n * k / kParallelWork + 1);
  const auto is_uneven = [&](int64_t blocks) {
    return blocks < threads || (blocks < 4 * threads && blocks % threads);
  };
  while (is_uneven(products * rows * columns)) {
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
    body(number, row, std::min(height, m - row), column, std::min(width, n - column));
  });
}

static void multiply(const Batch& batch) {
  const auto multiply_block = [&batch](int64_t number, int64_t row, int64_t rows, int64_t column,
                                       int64_t columns) {
    const Product product{data_type_of(batch.type),
                          batch.m,
                          batch.n,
                          batch.k,
                          batch.a[number],
                          batch.b[number],
                          batch.c[number],
                          batch.result[number],
                          batch.alpha,
                          batch.beta};
    portable_gemm().multiply(take_block(product, row, rows, column, columns));
  };
  for_each_block(batch.products, batch.m, batch.n, batch.k, kBlockRows, kBlockColumns,
                 multiply_block);
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

// Whether torch does not read the operands of a product: BLAS skips one times zero, in which a NaN
// would stay. torch's own loops do not, for bfloat16 and for small products of a batch.
static bool is_skipped(double alpha, at::ScalarType type, int64_t rank, int64_t multiplications) {
  constexpr int64_t kSmall = 400;
  return alpha == 0 && type != at::kBFloat16 && (rank == 2 || multiplications >= kSmall);
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
  c10::SmallVector<int64_t, 3> sizes(a.sizes().begin(), a.sizes().end() - 1);
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
    const bool is_c = c && c->const_data_ptr() == result.const_data_ptr() &&
                      c->sizes() == result.sizes() && c->strides() == result.strides();
    needs_copy =
        a.is_alias_of(result) || b.is_alias_of(result) || (c && !is_c && c->is_alias_of(result));
  }
  if (type == at::kBFloat16) note_bfloat16();
  const at::Tensor written =
      result.defined() && !needs_copy ? result : at::detail::empty_cpu(sizes, a.options());
  const bool adds = c && beta.toDouble() != 0;
  written.mutable_data_ptr();  // a copy that shares memory until it is written gets its own
  const int64_t multiplications = a.size(-2) * a.size(-1) * (is_vector ? 1 : b.size(-1));
  if (is_skipped(alpha.toDouble(), type, rank, multiplications)) {
    if (adds)
      written.copy_(c->expand(sizes)).mul_(beta);
    else
      written.zero_();
  } else {
    multiply({type, rank == 3 ? sizes[0] : 1, a.size(-2), is_vector ? 1 : b.size(-1), a.size(-1),
              Operands(a, a.sizes(), false), Operands(b, b.sizes(), is_vector),
              adds ? Operands(*c, sizes, is_vector) : Operands(),
              Operands(written, sizes, is_vector), adds ? beta.toDouble() : 0, alpha.toDouble()});
  }
  if (needs_copy)
    result.copy_(written);
  else if (!result.defined())
    result = written;
  return true;
}

// ---- products of segments ----

template <typename T>
static void sum_block(const Product& block, int64_t segments) {
  const int64_t terms = block.k / segments, waiting = count_waiting(segments);
  // It is the memory of a tensor that nothing else knows.
  T* const result = static_cast<T*>(const_cast<void*>(block.result.data));
  T* const scratch =
      static_cast<T*>(get_scratch(kSumScratch, waiting * block.m * block.n * int64_t{sizeof(T)}));
  sum_segments(segments, block.m, block.n, result, block.result.row_stride, scratch,
               [&](int64_t segment, T* place, int64_t pitch) {
                 Product part = take_terms(block, segment * terms, terms);
                 part.result = {place, pitch, 1};
                 portable_gemm().multiply(part);
               });
}

at::Tensor try_multiply_segments(const at::Tensor& a, const at::Tensor& b, int64_t segments) {
  const at::ScalarType type = a.scalar_type();
  const bool is_known = (type == at::kFloat || type == at::kDouble) && is_covered(a, type) &&
                        is_covered(b, type) && a.dim() == 2 && b.dim() == 2 &&
                        a.size(1) == b.size(0) && a.size(1) % segments == 0;
  if (!is_known || a.numel() == 0 || b.numel() == 0) return {};
  at::Tensor result = at::detail::empty_cpu({a.size(0), b.size(1)}, a.options());
  const Product product{data_type_of(type),
                        a.size(0),
                        b.size(1),
                        a.size(1),
                        Operands(a, a.sizes(), false)[0],
                        Operands(b, b.sizes(), false)[0],
                        {},
                        Operands(result, result.sizes(), false)[0],
                        1,
                        0};
  for_each_block(1, product.m, product.n, product.k, kSummedRows, kSummedColumns,
                 [&](int64_t, int64_t row, int64_t rows, int64_t column, int64_t columns) {
                   const Product block = take_block(product, row, rows, column, columns);
                   if (type == at::kFloat)
                     sum_block<float>(block, segments);
                   else
                     sum_block<double>(block, segments);
                 });
  return result;
}

// ---- the kernels ----

using at::Scalar;
using at::Tensor;

// What is not covered, such as complex numbers and float16, torch computes in one thread: BLAS
// divides the terms of a sum.
struct LibraryProduct : OneThread {
  explicit LibraryProduct(const Tensor& a) {
    if (a.is_complex()) note_unportable("products of complex numbers");
    if (a.scalar_type() == at::kHalf) note_unportable("products in float16");
  }
};

// Three forms of an operator beta * self + alpha * (a b).
#define DEFINE_WITH_ADDEND(NAME, DIMENSIONS)                                                   \
  static Tensor NAME(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, \
                     const Scalar& alpha) {                                                    \
    Tensor result;                                                                             \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, result)) return result;             \
    const LibraryProduct guard(a);                                                             \
    return at::cpu::NAME(self, a, b, beta, alpha);                                             \
  }                                                                                            \
  static Tensor& NAME##_out(const Tensor& self, const Tensor& a, const Tensor& b,              \
                            const Scalar& beta, const Scalar& alpha, Tensor& out) {            \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, out)) return out;                   \
    const LibraryProduct guard(a);                                                             \
    return at::cpu::NAME##_outf(self, a, b, beta, alpha, out);                                 \
  }                                                                                            \
  static Tensor& NAME##_in_place(Tensor& self, const Tensor& a, const Tensor& b,               \
                                 const Scalar& beta, const Scalar& alpha) {                    \
    if (try_multiply(&self, a, b, beta, alpha, DIMENSIONS, self, true)) return self;           \
    const LibraryProduct guard(a);                                                             \
    return at::cpu::NAME##_(self, a, b, beta, alpha);                                          \
  }

#define DEFINE_PRODUCT(NAME, DIMENSIONS)                                      \
  static Tensor NAME(const Tensor& a, const Tensor& b) {                      \
    Tensor result;                                                            \
    if (try_multiply(nullptr, a, b, 0, 1, DIMENSIONS, result)) return result; \
    const LibraryProduct guard(a);                                            \
    return at::cpu::NAME(a, b);                                               \
  }                                                                           \
  static Tensor& NAME##_out(const Tensor& a, const Tensor& b, Tensor& out) {  \
    if (try_multiply(nullptr, a, b, 0, 1, DIMENSIONS, out)) return out;       \
    const LibraryProduct guard(a);                                            \
    return at::cpu::NAME##_outf(a, b, out);                                   \
  }

namespace {
DEFINE_PRODUCT(mm, 2)
DEFINE_PRODUCT(bmm, 3)
DEFINE_WITH_ADDEND(addmm, 2)
DEFINE_WITH_ADDEND(baddbmm, 3)
DEFINE_WITH_ADDEND(addmv, 1)

// Of layers that only evaluate, such as those of nn.TransformerEncoder.
Tensor addmm_activation(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
                        const Scalar& alpha, bool use_gelu) {
  Tensor result = (addmm)(self, a, b, beta, alpha);  // this one, not that of at
  return use_gelu ? at::gelu_(result) : at::relu_(result);
}
}  // namespace

void register_products(torch::Library& library) {
  library.impl("mm", &mm);
  library.impl("mm.out", &mm_out);
  library.impl("bmm", &bmm);
  library.impl("bmm.out", &bmm_out);
  library.impl("addmm", &addmm);
  library.impl("addmm.out", &addmm_out);
  library.impl("addmm_", &addmm_in_place);
  library.impl("_addmm_activation", &addmm_activation);
  library.impl("baddbmm", &baddbmm);
  library.impl("baddbmm.out", &baddbmm_out);
  library.impl("baddbmm_", &baddbmm_in_place);
  library.impl("addmv", &addmv);
  library.impl("addmv.out", &addmv_out);
  library.impl("addmv_", &addmv_in_place);
}

}  // namespace lockstep
