// Cells of LSTM layers: close to those in double, and the same bits for every kind of processor.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "gemm.h"

using namespace lockstep;

namespace {

constexpr int64_t kRows = 3, kHidden = 37, kPitch = 6 * kHidden + 5;  // not of whole vectors

struct Cells {
  std::vector<float> state, before, output, of_output, of_h, of_c, gates;

  explicit Cells(const LstmCell& cell)
      : state(kRows * kPitch),
        before(kRows * kHidden),
        output(kRows * kHidden),
        of_output(kRows * kHidden),
        of_h(kRows * kHidden),
        of_c(kRows * kHidden),
        gates(kRows * 4 * kHidden) {
    uint32_t seed = 1;
    for (auto* values : {&state, &before, &of_output, &of_h, &of_c})
      for (float& value : *values) {
        seed = seed * 1664525 + 1013904223;
        value = 12 * (static_cast<float>(seed >> 8) / (1 << 23) - 1);
      }
    cell.compute({kRows, kHidden, state.data(), kPitch, before.data(), kHidden, output.data()});
    cell.differentiate({kRows, kHidden, state.data(), kPitch, before.data(), kHidden,
                        of_output.data(), kHidden, of_h.data(), of_c.data(), gates.data()});
  }
};

// The functions of a value, as the gates i and g of a cell.
std::vector<float> compute_gates(const LstmCell& cell, float value) {
  std::vector<float> state(6, value), before(1), output(1);
  cell.compute({1, 1, state.data(), 6, before.data(), 1, output.data()});
  return state;
}

bool is_close(float found, double expected) {
  const double ulp = std::max(std::abs(expected), 1e-30) * std::numeric_limits<float>::epsilon();
  return std::abs(found - expected) <= 3 * ulp;
}

}  // namespace

TEST(functions_of_a_cell_are_those_in_double) {
  for (const char* name : {"plain", "avx2", "avx512"}) {
    const Gemm* gemm = find_gemm(name);
    if (!gemm) continue;
    for (float x = 1e-20f; x < 80; x *= 1.03f)
      for (const float value : {x, -x}) {
        const std::vector<float> state = compute_gates(gemm->lstm_cell, value);
        const double sigmoid = 1 / (1 + std::exp(-static_cast<double>(value)));
        CHECK(is_close(state[0], sigmoid));
        CHECK(is_close(state[2], std::tanh(static_cast<double>(value))));
      }
    constexpr float kInfinite = std::numeric_limits<float>::infinity();
    CHECK(compute_gates(gemm->lstm_cell, kInfinite)[0] == 1);
    CHECK(compute_gates(gemm->lstm_cell, -kInfinite)[0] < 1e-37f);
    CHECK(compute_gates(gemm->lstm_cell, -kInfinite)[2] == -1);
    CHECK(std::signbit(compute_gates(gemm->lstm_cell, -0.f)[2]));
    CHECK(std::isnan(compute_gates(gemm->lstm_cell, std::nanf(""))[0]));
    CHECK(std::isnan(compute_gates(gemm->lstm_cell, std::nanf(""))[2]));
  }
}

TEST(cells_have_the_same_bits_on_every_processor) {
  const Cells expected(find_gemm("plain")->lstm_cell);
  for (const char* name : {"avx2", "avx512"}) {
    const Gemm* gemm = find_gemm(name);
    if (!gemm) continue;
    const Cells found(gemm->lstm_cell);
    CHECK(found.state == expected.state);
    CHECK(found.output == expected.output);
    CHECK(found.of_c == expected.of_c);
    CHECK(found.gates == expected.gates);
  }
}
