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

// Seeds torch's default generator of the CPU for units, which are mostly called in one order, and
// the generators of Python and numpy for micro-batches. All are Mersenne Twisters.
//
// A Mersenne Twister begins with 624 words of which each depends on the one before, 1.1 us, and
// 3.4 us for Python. The words of four in turn take as long as those of one, since a processor
// computes them at the same time; so the first unit of four prepares the others, and the first
// micro-batch of four those of the next ones.
class UnitSeeder {
 public:
  // `units`: the numbers of the units in the order of their calls.
  explicit UnitSeeder(std::vector<int64_t> units) : units_(std::move(units)) {}

  // Seeds the generator with the key that begins with `prefix` (int64 values) and ends with `unit`
  // and, unless it is 0, `call`. Returns the seed.
  uint64_t seed(std::string_view prefix, int64_t unit, int64_t call);

  // Seeds the memory of Python's generator at `address` as `random.seed` does, with the same seed:
  // a position of 32 bits, and 624 words. The last part of the prefix has to be a micro-batch.
  void seed_python(uint64_t address);

  // Seeds the memory of numpy's generator at `address` as `numpy.random.seed` does, with the low 32
  // bits of the same seed: 624 words, and a position. Returns false, and changes nothing, if
  // numbers were drawn since it was called: numpy may keep a normal number outside of this memory.
  bool seed_numpy(uint64_t address);

 private:
  static constexpr size_t kTogether = 4;
  using Words = std::array<uint32_t, at::MERSENNE_STATE_N>;
  void prepare(size_t first);
  void prepare_python();

  const std::vector<int64_t> units_;
  // The last seed.
  std::string prefix_;
  int64_t unit_ = 0, call_ = 0;
  uint64_t seed_ = 0;
  // Engines of the units from number `first_` in `units_`, for the keys that begin with
  // `engines_prefix_`.
  std::string engines_prefix_;
  size_t first_ = 0, prepared_ = 0;
  std::array<at::mt19937, kTogether> engines_;
  // The words of Python's generator for each of `python_seeds_`, and numpy's first words.
  std::vector<uint64_t> python_seeds_;
  std::array<Words, kTogether> python_words_;
  std::array<uint32_t, 4> numpy_words_{};
};

// Moves the gradients of a micro-batch out of `.grad`, and adds them to its left siblings in the
// tree, innermost first: each sum is stored in the gradients of the left sibling, the last one in
// `outs` where there is one. Returns the sums.
//
// Returns nothing, and changes nothing, unless all gradients have the dtype and the strides of
// their parameters, and all siblings have gradients of the same parameters.
std::optional<Gradients> accumulate_gradients(const std::vector<at::Tensor>& parameters,
                                              const std::vector<Gradients>& siblings,
                                              const Gradients& outs);

// Returns the 2-norm of each gradient, as `torch._foreach_norm` computes it for a vector. Returns
// nothing unless all are contiguous tensors on the CPU.
std::optional<std::vector<double>> compute_norms(const std::vector<at::Tensor>& gradients);

}  // namespace lockstep
