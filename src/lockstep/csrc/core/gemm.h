// Matrix products whose bits depend on nothing but the operands.
//
//     result = alpha * (a b) + beta * c
//
// Element (i, j) of a b is a chain of fused multiply-adds in the order of k, which begins at 0:
//
//     sum = 0;  for p in 0 .. k-1:  sum = fma(a[i][p], b[p][j], sum)
//
// Vectors, tiles and threads only decide which elements are computed together. So every processor,
// instruction set and number of threads gives the same bits, which no BLAS library does. Products
// and sums of bfloat16 are float32. Afterwards alpha * sum, beta * c and their sum are each rounded
// to the type of the sums; only then the result is rounded to its own type. If beta is 0, c is not
// read; if alpha is 1 and beta is 0, the result is the sum.
//
// The kernels are compiled three times, like those of kernels.h: "plain" (uses NEON on Arm, and
// elsewhere the fma of the C library, which is slow), AVX2 with FMA, and AVX-512.
#pragma once

#include <cstdint>

#include "direct_convolution.h"
#include "functions.h"
#include "kernels.h"
#include "layer_norm.h"
#include "lstm_cell.h"
#include "softmax.h"

namespace lockstep {

// Strides are in elements, and may be 0.
struct Operand {
  const void* data;
  int64_t row_stride, column_stride;
};

// Rows of b that hold only zeros in some columns: row p has something else in column j only if
// bit p % period of filled[j / span] is set. The other products are left out.
struct Gaps {
  const uint64_t* filled = nullptr;
  int64_t span = 1, period = 64;
};

struct Product {
  DataType type;    // f32, f64 or bf16, of all operands
  int64_t m, n, k;  // a is m x k, b is k x n
  Operand a, b, c;  // c is read only if beta is not 0
  Operand result;   // its data is written; may be c with the same strides, but not a or b
  double alpha, beta;
  // The sums begin with the values of `result` instead of 0; alpha is 1, and beta is 0.
  bool continues = false;
  // For finite elements of a, which changes only signs of zeros.
  Gaps gaps;
};

struct Gemm {
  // Computes a product in the calling thread; a large one should be divided into blocks.
  void (*multiply)(const Product& product);
  LstmCell lstm_cell;
  Softmax softmax;
  DirectConvolution direct;
  const Functions& functions;
  AddNormRows add_norm_rows;
  const char* name;
};

// The part of a product that a thread computes at once: it packs the operands' parts once.
constexpr int64_t kBlockRows = 768, kBlockColumns = 1536;
Product take_block(const Product& product, int64_t row, int64_t rows, int64_t column,
                   int64_t columns);
// A product with only some of the terms of every sum.
Product take_terms(const Product& product, int64_t first, int64_t terms);

// Memory of the calling thread that is kept for its next product; `use` is 0 to 5, and 0 to 2 in
// products.
void* get_scratch(int use, int64_t bytes);

const Gemm& gemm();                       // the fastest for this processor, or $LOCKSTEP_KERNELS
const Gemm* find_gemm(const char* name);  // nullptr if not supported here

}  // namespace lockstep
