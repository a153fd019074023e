// Products, compared with chains of fused multiply-adds. Sanitizers find reads beyond an operand,
// whose memory ends with its last element.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "check.h"
#include "gemm.h"

using namespace lockstep;

namespace {

template <typename T>
struct Matrix {
  std::vector<T> values;
  int64_t row_stride, column_stride;

  Matrix(int64_t rows, int64_t columns, bool by_column, uint32_t seed)
      : values(static_cast<size_t>(rows * columns)),
        row_stride(by_column ? 1 : columns),
        column_stride(by_column ? rows : 1) {
    for (T& value : values) {
      seed = seed * 1664525 + 1013904223;
      value = static_cast<T>(static_cast<double>(seed >> 8) / (1 << 23) - 1);
    }
  }
  T& at(int64_t row, int64_t column) {
    return values[static_cast<size_t>(row * row_stride + column * column_stride)];
  }
  Operand operand() { return {values.data(), row_stride, column_stride}; }
};

template <typename T>
void check_product(const Gemm& gemm, int64_t m, int64_t n, int64_t k, int layouts) {
  Matrix<T> a(m, k, layouts & 1, 1), b(k, n, layouts & 2, 2), c(m, n, layouts & 4, 3),
      result(m, n, layouts & 8, 4);
  const double alpha = 0.75, beta = layouts & 16 ? -1.5 : 0;
  const DataType type = std::is_same_v<T, float> ? DataType::f32 : DataType::f64;
  gemm.multiply(
      {type, m, n, k, a.operand(), b.operand(), c.operand(), result.operand(), alpha, beta});
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      T sum = 0;
      for (int64_t p = 0; p < k; ++p) sum = std::fma(a.at(i, p), b.at(p, j), sum);
      T expected = static_cast<T>(alpha) * sum;
      if (beta != 0) expected = expected + static_cast<T>(beta) * c.at(i, j);
      CHECK(result.at(i, j) == expected);
    }
}

}  // namespace

TEST(products_are_chains_of_fused_multiply_adds) {
  const int64_t sizes[][3] = {{1, 1, 1},   {3, 5, 2},    {14, 32, 9}, {15, 33, 8},
                              {29, 17, 3}, {2, 40, 260}, {40, 2, 11}, {180, 35, 5},
                              {1, 16, 8},  {1, 150, 21}, {45, 1, 9}};
  for (const char* name : {"plain", "avx2", "avx512"}) {
    const Gemm* gemm = find_gemm(name);
    if (!gemm) continue;
    for (int layouts = 0; layouts < 32; ++layouts)
      for (const auto& [m, n, k] : sizes) {
        check_product<float>(*gemm, m, n, k, layouts);
        check_product<double>(*gemm, m, n, k, layouts);
      }
  }
}

TEST(a_product_continues_the_sums_of_another) {
  constexpr int64_t kHalf = 11;
  const int64_t sizes[][2] = {{1, 45}, {3, 45}, {20, 4}, {9, 33}};
  for (const auto& [m, n] : sizes)
    for (int layouts = 0; layouts < 4; ++layouts) {
      Matrix<double> a(m, 2 * kHalf, false, 1), b(2 * kHalf, n, layouts & 1, 2),
          whole(m, n, layouts & 2, 3), sums(m, n, layouts & 2, 4);
      Product product{DataType::f64,   m, n, 2 * kHalf, a.operand(), b.operand(), {nullptr, 0, 0},
                      whole.operand(), 1, 0};
      gemm().multiply(product);
      product.k = kHalf;
      product.result = sums.operand();
      gemm().multiply(product);
      product.a.data = &a.at(0, kHalf);
      product.b.data = &b.at(kHalf, 0);
      product.continues = true;
      gemm().multiply(product);
      CHECK(whole.values == sums.values);
    }
}

TEST(blocks_of_a_product_are_the_product) {
  Matrix<float> a(20, 30, false, 1), b(30, 50, true, 2), whole(20, 50, false, 3),
      parts(20, 50, false, 4);
  Product product{DataType::f32,   20, 50, 30, a.operand(), b.operand(), {nullptr, 0, 0},
                  whole.operand(), 1,  0};
  gemm().multiply(product);
  product.result = parts.operand();
  for (int64_t row = 0; row < 20; row += 7)
    for (int64_t column = 0; column < 50; column += 13)
      gemm().multiply(take_block(product, row, std::min<int64_t>(7, 20 - row), column,
                                 std::min<int64_t>(13, 50 - column)));
  CHECK(whole.values == parts.values);
}
