#include "gemm.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

namespace lockstep {

// The kernels of a set, which are compiled in a namespace of its name.
#define DECLARE_KERNELS(NAME)                                                                  \
  namespace NAME {                                                                             \
  void multiply(const Product& product);                                                       \
  void compute_cells(const CellRows& rows);                                                    \
  void differentiate_cells(const CellGradients& gradients);                                    \
  void normalize_scores(const ScoreRows& rows, void* scores, void* sums, int64_t stride);      \
  void restore_weights(const ScoreRows& rows, void* scores, const void* sums, int64_t stride); \
  void differentiate_weights(const ScoreRows& rows, const void* weights, void* gradients);     \
  int64_t choose_lanes(DataType type, int64_t images);                                         \
  int64_t find_height(int64_t rows);                                                           \
  int64_t count_factors(int64_t terms, int64_t taps);                                          \
  void pack_factors(const DirectProduct& tile, int64_t number, const void* from,               \
                    const FactorStrides& strides, void* to);                                   \
  void interleave_images(DataType type, int64_t lanes, int64_t images, int64_t pixels,         \
                         const void* from, int64_t stride, void* to);                          \
  void separate_images(DataType type, int64_t lanes, int64_t images, int64_t pixels,           \
                       const void* from, void* to, int64_t stride);                            \
  void multiply_planes(const DirectProduct& product);                                          \
  extern const Functions functions;                                                            \
  void add_norm_rows(const NormRows& rows, float* of_weight, float* of_bias);                  \
  static const Gemm kernels{multiply,                                                          \
                            {compute_cells, differentiate_cells},                              \
                            {normalize_scores, restore_weights, differentiate_weights},        \
                            {choose_lanes, find_height, count_factors, pack_factors,           \
                             interleave_images, separate_images, multiply_planes},             \
                            functions,                                                         \
                            add_norm_rows,                                                     \
                            #NAME};                                                            \
  }
DECLARE_KERNELS(plain)
#if defined(__x86_64__)
DECLARE_KERNELS(avx2)
DECLARE_KERNELS(avx512)
#endif

const Gemm* find_gemm(const char* name) {
  if (std::strcmp(name, "plain") == 0) return &plain::kernels;
#if defined(__x86_64__)
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma"))
    return &avx2::kernels;
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    return &avx512::kernels;
#endif
  return nullptr;
}

static const Gemm& select_gemm() {
  const char* requested = std::getenv("LOCKSTEP_KERNELS");
  if (requested)
    if (const Gemm* found = find_gemm(requested)) return *found;
  for (const char* name : {"avx512", "avx2"})
    if (const Gemm* found = find_gemm(name)) return *found;
  return *find_gemm("plain");
}

const Gemm& gemm() {
  static const Gemm& chosen = select_gemm();
  return chosen;
}

void* get_scratch(int use, int64_t bytes) {
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  static thread_local struct {
    std::unique_ptr<void, Free> data;
    size_t bytes = 0;
  } memory[6];
  auto& scratch = memory[use];
  const size_t needed = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  if (needed > scratch.bytes) {
    scratch.bytes = 0;
    scratch.data.reset();
    scratch.data.reset(std::aligned_alloc(64, needed));
    if (!scratch.data) throw std::bad_alloc();
    scratch.bytes = needed;
  }
  return scratch.data.get();
}

static Operand shift(const Operand& operand, int64_t row, int64_t column, size_t element) {
  const int64_t offset = row * operand.row_stride + column * operand.column_stride;
  const char* data = static_cast<const char*>(operand.data);
  return {data ? data + offset * static_cast<int64_t>(element) : data, operand.row_stride,
          operand.column_stride};
}

Product take_block(const Product& product, int64_t row, int64_t rows, int64_t column,
                   int64_t columns) {
  const size_t element = element_size(product.type);
  Product block = product;
  block.m = rows, block.n = columns;
  block.a = shift(product.a, row, 0, element);
  block.b = shift(product.b, 0, column, element);
  block.c = shift(product.c, row, column, element);
  block.result = shift(product.result, row, column, element);
  return block;
}

Product take_terms(const Product& product, int64_t first, int64_t terms) {
  const size_t element = element_size(product.type);
  Product part = product;
  part.k = terms;
  part.a = shift(product.a, 0, first, element);
  part.b = shift(product.b, first, 0, element);
  return part;
}

}  // namespace lockstep
