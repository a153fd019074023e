// What a step does after each unit and micro-batch of a model, where Python would take as long as
// the arithmetic of a small one.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

using Gradients = std::vector<std::optional<at::Tensor>>;  // one per parameter

// Seeds torch's default generator of the CPU for units, which are mostly called in one order.
//
// A Mersenne Twister begins with 624 words of which each depends on the one before, 1.1 us. The
// words of four units in turn take as long as those of one, since a processor computes them at the
// same time; so the first unit of four prepares the others.
class UnitSeeder {
 public:
  // `units`: the numbers of the units in the order of their calls.
  explicit UnitSeeder(std::vector<int64_t> units) : units_(std::move(units)) {}

  // Seeds the generator with the key that begins with `prefix` (int64 values) and ends with `unit`
  // and, unless it is 0, `call`. Returns the seed.
  uint64_t seed(std::string_view prefix, int64_t unit, int64_t call);

 private:
  static constexpr size_t kTogether = 4;
  void prepare(size_t first);

  const std::vector<int64_t> units_;
  // Engines of the units from number `first_` in `units_`, for the keys that begin with `prefix_`.
  std::string prefix_;
  size_t first_ = 0, prepared_ = 0;
  std::array<at::mt19937, kTogether> engines_;
};

// Seeds a Mersenne Twister in memory, as `random.seed` of Python does: a position of 32 bits, and
// 624 words.
void seed_twister(uint64_t address, uint64_t seed);

// Moves the gradients of a micro-batch out of `.grad`, and adds them to its left siblings in the
// tree, innermost first: each sum is stored in the gradients of the left sibling, the last one in
// `outs` where there is one. Returns the sums.
//
// Returns nothing, and changes nothing, unless all gradients have the dtype and the strides of
// their parameters, and all siblings have gradients of the same parameters.
std::optional<Gradients> accumulate_gradients(const std::vector<at::Tensor>& parameters,
                                              const std::vector<Gradients>& siblings,
                                              const Gradients& outs);

}  // namespace lockstep
