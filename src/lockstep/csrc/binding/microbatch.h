// What a step does after each scope and micro-batch of a model, where Python would take as long as
// the arithmetic of a small one.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Returns the seed of a call of a scope: the key that begins with `prefix` (int64 values) and ends
// with `scope` and, unless it is 0, `call`.
uint64_t find_seed(std::string_view prefix, int64_t scope, int64_t call);

// Seeds torch's default generator of the CPU for scopes, which are mostly called in one order, and
// the generators of Python and numpy for micro-batches. All are Mersenne Twisters.
//
// A Mersenne Twister begins with 624 words of which each depends on the one before, 1.1 us, and
// 3.4 us for Python. The words of four in turn take as long as those of one, since a processor
// computes them at the same time; so the first scope of four prepares the others, also those of the
// next micro-batch, and the first micro-batch of four those of the next ones.
class ScopeSeeder {
 public:
  // `scopes`: the numbers of the scopes in the order of their calls. `get_numpy` returns numpy's
  // generator. `seed_others(seeder, seed)` seeds the generators of numpy and Python by their own
  // functions, if their memory is not known.
  ScopeSeeder(std::vector<int64_t> scopes, pybind11::function get_numpy,
              pybind11::function seed_others);

  // Seeds the generator for a call of a scope. Returns the seed.
  uint64_t seed(std::string_view prefix, int64_t scope, int64_t call);

  // The same for `scope` without a call, and seeds the generators of Python and numpy with the same
  // seed (numpy's with its low 32 bits). The last part of the prefix has to be a micro-batch.
  uint64_t begin(std::string_view prefix, int64_t scope);

  // Seeds and restores these generators in memory from now on, numpy's as long as it is this one.
  // Python's memory is a position of 32 bits and 624 words, numpy's 624 words and a position.
  // Both draw normal numbers in pairs; numpy keeps the second one as a `SecondNumber`.
  void know_others(pybind11::object python, uint64_t python_address, pybind11::object numpy,
                   uint64_t numpy_address, uint64_t second_address);

  // Returns Python's memory and its second normal number, numpy's memory, whether it has a second
  // normal number, and this number; None if not known.
  pybind11::object read_others() const;

  // Restores what `read_others` returned.
  void write_others(const pybind11::tuple& states);

 private:
  static constexpr size_t kTogether = 4;
  using Words = std::array<uint32_t, at::MERSENNE_STATE_N>;
  struct SecondNumber {
    int has_value;
    double value;
  };
  const at::mt19937& find_engine(std::string_view prefix, size_t number);
  void seed_python(std::string_view prefix, int64_t scope, uint64_t seed);
  void prepare_python(std::string_view prefix, int64_t scope);
  void seed_numpy(const at::mt19937& engine);
  bool has_numpy() const { return numpy_memory_ && get_numpy_().is(numpy_); }

  const std::vector<int64_t> scopes_;
  const pybind11::function get_numpy_, seed_others_;
  // The engines of the next scopes, and the prefixes and scopes of their keys; none after an error.
  std::vector<std::pair<std::string, int64_t>> keys_;
  std::array<at::mt19937, kTogether> engines_;
  // The words of Python's generator for each of these seeds.
  std::vector<uint64_t> python_seeds_;
  std::array<Words, kTogether> python_words_;
  pybind11::object python_, numpy_, lock_;
  uint32_t *python_memory_ = nullptr, *numpy_memory_ = nullptr;
  SecondNumber* numpy_second_ = nullptr;
};

// Moves the gradients of a node, such as a micro-batch, out of `.grad`, and adds them to its left
// siblings in the tree, innermost first, which leave `nodes`; the sum enters it.
//
// `nodes`: the values of nodes (lo, hi), each a list with a gradient or None per parameter.
// `siblings`: the pairs of left siblings and their parents; those after one that is not in `nodes`
// have leaves of other ranks. Each sum is stored in the gradients of the left sibling, the last one
// in `destinations`, where these have memory for the node, by parameter.
//
// Returns false, and changes nothing, unless all gradients have the dtype and the strides of
// their parameters, and all siblings have gradients of the same parameters.
bool accumulate_gradients(const std::vector<at::Tensor>& parameters, const pybind11::dict& nodes,
                          pybind11::object node, const pybind11::sequence& siblings,
                          const pybind11::dict& destinations);

// Returns the 2-norm of each gradient, as `torch._foreach_norm` computes it for a vector. Returns
// nothing unless all are contiguous tensors on the CPU.
std::optional<std::vector<double>> compute_norms(const std::vector<at::Tensor>& gradients);

}  // namespace lockstep
