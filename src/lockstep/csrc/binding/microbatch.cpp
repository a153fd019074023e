#include "microbatch.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "blake2b.h"
#include "torch_errors.h"

namespace lockstep {

static uint64_t hash_key(std::string_view prefix, int64_t unit, int64_t call) {
  char message[kBlake2bBlock];
  CHECK_ARGUMENT(prefix.size() + 2 * sizeof(int64_t) <= sizeof(message), "the prefix is too long");
  const int64_t parts[] = {unit, call};
  const size_t bytes = call ? sizeof(parts) : sizeof(unit);
  std::memcpy(message, prefix.data(), prefix.size());
  std::memcpy(message + prefix.size(), parts, bytes);
  return blake2b_64(message, prefix.size() + bytes);
}

uint64_t UnitSeeder::seed(std::string_view prefix, int64_t unit, int64_t call) {
  const auto found = call ? units_.end() : std::find(units_.begin(), units_.end(), unit);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  if (found == units_.end()) {
    const uint64_t seed = hash_key(prefix, unit, call);
    std::scoped_lock<std::mutex> lock(generator.mutex());
    generator.get<at::CPUGeneratorImpl>()->set_current_seed(seed);
    return seed;
  }
  const auto number = static_cast<size_t>(found - units_.begin());
  if (prefix != prefix_ || number < first_ || number >= first_ + prepared_) {
    prefix_ = prefix;
    prepare(number);
  }
  const at::mt19937& engine = engines_[number - first_];
  std::scoped_lock<std::mutex> lock(generator.mutex());
  auto* const state = generator.get<at::CPUGeneratorImpl>();  // as its `set_current_seed` does
  state->set_next_float_normal_sample(std::nullopt);
  state->set_next_double_normal_sample(std::nullopt);
  state->set_engine(engine);
  return engine.seed();
}

void UnitSeeder::prepare(size_t first) {
  prepared_ = 0;  // in case of an error
  const size_t count = std::min(kTogether, units_.size() - first);
  std::array<at::mt19937_data_pod, kTogether> states;
  std::array<uint32_t, kTogether> words{};
  for (size_t n = 0; n < count; ++n) {
    const uint64_t seed = hash_key(prefix_, units_[first + n], 0);
    words[n] = static_cast<uint32_t>(seed);
    states[n].seed_ = seed;
    states[n].left_ = 1;
    states[n].seeded_ = true;
    states[n].next_ = 0;
    states[n].state_[0] = words[n];
  }
  // As `at::mt19937` does for one seed.
  for (uint32_t j = 1; j < at::MERSENNE_STATE_N; ++j)
    for (size_t n = 0; n < kTogether; ++n)
      states[n].state_[j] = words[n] = 1812433253 * (words[n] ^ (words[n] >> 30)) + j;
  for (size_t n = 0; n < count; ++n) engines_[n].set_data(states[n]);
  first_ = first;
  prepared_ = count;
}

void seed_twister(uint64_t address, uint64_t seed) {
  constexpr uint32_t kWords = at::MERSENNE_STATE_N;
  static const std::array<uint32_t, kWords> initial = [] {
    std::array<uint32_t, kWords> words;
    words[0] = 19650218;
    for (uint32_t j = 1; j < kWords; ++j)
      words[j] = 1812433253 * (words[j - 1] ^ (words[j - 1] >> 30)) + j;
    return words;
  }();
  auto* const memory = reinterpret_cast<uint32_t*>(address);
  uint32_t* const words = memory + 1;
  std::memcpy(words, initial.data(), sizeof(initial));
  const uint32_t key[] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const uint32_t length = key[1] ? 2 : 1;
  uint32_t i = 1;
  const auto mix = [&](uint32_t factor, uint32_t term) {
    words[i] = (words[i] ^ ((words[i - 1] ^ (words[i - 1] >> 30)) * factor)) + term;
    if (++i == kWords) {
      words[0] = words[kWords - 1];
      i = 1;
    }
  };
  for (uint32_t k = 0; k < kWords; ++k) mix(1664525, key[k % length] + k % length);
  for (uint32_t k = 1; k < kWords; ++k) mix(1566083941, -i);
  words[0] = 0x80000000;
  memory[0] = kWords;
}

namespace {

bool is_usual(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.scalar_type() == parameter.scalar_type() && gradient.layout() == at::kStrided &&
         !gradient.requires_grad() && gradient.strides() == parameter.strides();
}

}  // namespace

std::optional<Gradients> accumulate_gradients(const std::vector<at::Tensor>& parameters,
                                              const std::vector<Gradients>& siblings,
                                              const Gradients& outs) {
  const c10::AutoGradMode no_grad(false);
  const size_t count = parameters.size();
  std::vector<size_t> held;
  std::vector<at::Tensor> added;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (!is_usual(gradient, parameters[i])) return std::nullopt;
    held.push_back(i);
    added.push_back(gradient);
  }
  std::vector<std::vector<at::Tensor>> lefts;
  for (const Gradients& sibling : siblings) {
    CHECK_ARGUMENT(sibling.size() == count, "a sibling needs an entry per parameter");
    size_t present = 0;
    for (const auto& each : sibling) present += each.has_value();
    if (present != held.size()) return std::nullopt;
    std::vector<at::Tensor>& left = lefts.emplace_back();
    for (const size_t i : held) {
      if (!sibling[i]) return std::nullopt;
      left.push_back(*sibling[i]);
    }
  }
  for (const size_t i : held) parameters[i].mutable_grad() = at::Tensor();
  for (size_t number = 0; number < lefts.size() && !held.empty(); ++number) {
    std::vector<at::Tensor>& left = lefts[number];
    if (number + 1 < lefts.size() || outs.empty()) {
      at::_foreach_add_(left, added);
      added = left;
      continue;
    }
    for (size_t n = 0; n < held.size(); ++n) {
      at::Tensor out = outs[held[n]].value_or(left[n]);
      added[n] = at::add_out(out, left[n], added[n]);
    }
  }
  Gradients sums(count);
  for (size_t n = 0; n < held.size(); ++n) sums[held[n]] = added[n];
  return sums;
}

}  // namespace lockstep
