#include "microbatch.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_norm.h>
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
  auto* const state = generator.get<at::CPUGeneratorImpl>();
  if (found == units_.end()) {
    seed_ = hash_key(prefix, unit, call);
    std::scoped_lock<std::mutex> lock(generator.mutex());
    state->set_current_seed(seed_);
  } else {
    const auto number = static_cast<size_t>(found - units_.begin());
    if (prefix != engines_prefix_ || number < first_ || number >= first_ + prepared_) {
      engines_prefix_ = prefix;
      prepare(number);
    }
    const at::mt19937& engine = engines_[number - first_];
    seed_ = engine.seed();
    std::scoped_lock<std::mutex> lock(generator.mutex());  // as `set_current_seed` does
    state->set_next_float_normal_sample(std::nullopt);
    state->set_next_double_normal_sample(std::nullopt);
    state->set_engine(engine);
  }
  if (prefix != prefix_) prefix_ = prefix;
  unit_ = unit;
  call_ = call;
  return seed_;
}

void UnitSeeder::prepare(size_t first) {
  prepared_ = 0;  // in case of an error
  const size_t count = std::min(kTogether, units_.size() - first);
  std::array<at::mt19937_data_pod, kTogether> states;
  std::array<uint32_t, kTogether> words{};
  for (size_t n = 0; n < count; ++n) {
    const uint64_t seed = hash_key(engines_prefix_, units_[first + n], 0);
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

void UnitSeeder::seed_python(uint64_t address) {
  auto found = std::find(python_seeds_.begin(), python_seeds_.end(), seed_);
  if (found == python_seeds_.end()) {
    prepare_python();
    found = python_seeds_.begin();
  }
  auto* const memory = reinterpret_cast<uint32_t*>(address);
  const Words& words = python_words_[static_cast<size_t>(found - python_seeds_.begin())];
  memory[0] = at::MERSENNE_STATE_N;
  std::memcpy(memory + 1, words.data(), sizeof(words));
}

void UnitSeeder::prepare_python() {
  constexpr uint32_t kWords = at::MERSENNE_STATE_N;
  static const Words initial = [] {
    Words words;
    words[0] = 19650218;
    for (uint32_t j = 1; j < kWords; ++j)
      words[j] = 1812433253 * (words[j - 1] ^ (words[j - 1] >> 30)) + j;
    return words;
  }();
  CHECK_ARGUMENT(prefix_.size() >= sizeof(int64_t), "the prefix has no micro-batch");
  python_seeds_.clear();
  std::string prefix = prefix_;
  char* const last = prefix.data() + prefix.size() - sizeof(int64_t);
  uint64_t microbatch;
  std::memcpy(&microbatch, last, sizeof(microbatch));
  std::array<std::array<uint32_t, 2>, kTogether> terms;  // added in turn
  for (size_t n = 0; n < kTogether; ++n, ++microbatch) {
    std::memcpy(last, &microbatch, sizeof(microbatch));
    const uint64_t seed = python_seeds_.emplace_back(hash_key(prefix, unit_, call_));
    const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    terms[n] = {low, high ? high + 1 : low};  // Python's key has as many words as it needs
    python_words_[n] = initial;
  }
  uint32_t i = 1;
  std::array<uint32_t, kTogether> before;  // the word before word i, of each
  before.fill(initial[0]);
  const auto mix = [&](uint32_t factor, auto term) {
    for (size_t n = 0; n < kTogether; ++n) {
      uint32_t& word = python_words_[n][i];
      word = before[n] = (word ^ ((before[n] ^ (before[n] >> 30)) * factor)) + term(n);
    }
    if (++i == kWords) i = 1;  // the last word counts as word 0
  };
  for (uint32_t k = 0; k < kWords; ++k) mix(1664525, [&](size_t n) { return terms[n][k % 2]; });
  for (uint32_t k = 1; k < kWords; ++k) mix(1566083941, [&](size_t) { return -i; });
  for (Words& words : python_words_) words[0] = 0x80000000;
}

bool UnitSeeder::seed_numpy(uint64_t address) {
  constexpr uint32_t kWords = at::MERSENNE_STATE_N;
  auto* const memory = reinterpret_cast<uint32_t*>(address);
  uint32_t& position = memory[kWords];
  const bool is_drawn =
      position != kWords || std::memcmp(memory, numpy_words_.data(), sizeof(numpy_words_)) != 0;
  const bool is_prepared = !call_ && prefix_ == engines_prefix_ && first_ < units_.size() &&
                           prepared_ && units_[first_] == unit_;
  const at::mt19937_data_pod state = (is_prepared ? engines_[0] : at::mt19937(seed_)).data();
  std::copy_n(state.state_.begin(), numpy_words_.size(), numpy_words_.begin());
  if (is_drawn) return false;
  std::memcpy(memory, state.state_.data(), kWords * sizeof(uint32_t));
  return true;
}

namespace {

bool is_usual(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.scalar_type() == parameter.scalar_type() && gradient.layout() == at::kStrided &&
         !gradient.requires_grad() && gradient.strides() == parameter.strides() &&
         !gradient.is_conj() && !gradient.is_neg();
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

std::optional<std::vector<double>> compute_norms(const std::vector<at::Tensor>& gradients) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> vectors;
  for (const at::Tensor& gradient : gradients) {
    if (!gradient.is_cpu() || !gradient.is_contiguous()) return std::nullopt;
    vectors.push_back(gradient.view(-1));
  }
  std::vector<double> norms;
  if (vectors.empty()) return norms;
  for (const at::Tensor& norm : at::_foreach_norm(vectors)) norms.push_back(norm.item<double>());
  return norms;
}

}  // namespace lockstep
