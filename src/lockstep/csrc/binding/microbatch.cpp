#include "microbatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "blake2b.h"
#include "torch_errors.h"

namespace py = pybind11;

namespace lockstep {

uint64_t find_seed(std::string_view prefix, int64_t scope, int64_t call) {
  char message[kBlake2bBlock];
  CHECK_ARGUMENT(prefix.size() + 2 * sizeof(int64_t) <= sizeof(message), "the prefix is too long");
  const int64_t parts[] = {scope, call};
  const size_t bytes = call ? sizeof(parts) : sizeof(scope);
  std::memcpy(message, prefix.data(), prefix.size());
  std::memcpy(message + prefix.size(), parts, bytes);
  return blake2b_64(message, prefix.size() + bytes);
}

ScopeSeeder::ScopeSeeder(std::vector<int64_t> scopes, py::function get_numpy,
                         py::function seed_others)
    : scopes_(std::move(scopes)),
      get_numpy_(std::move(get_numpy)),
      seed_others_(std::move(seed_others)) {}

uint64_t ScopeSeeder::seed(std::string_view prefix, int64_t scope, int64_t call) {
  const auto known = call ? scopes_.end() : std::find(scopes_.begin(), scopes_.end(), scope);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  auto* const state = generator.get<at::CPUGeneratorImpl>();
  if (known == scopes_.end()) {
    const uint64_t seed = find_seed(prefix, scope, call);
    std::scoped_lock<std::mutex> lock(generator.mutex());
    state->set_current_seed(seed);
    return seed;
  }
  const at::mt19937& engine = find_engine(prefix, static_cast<size_t>(known - scopes_.begin()));
  std::scoped_lock<std::mutex> lock(generator.mutex());  // as `set_current_seed` does
  state->set_next_float_normal_sample(std::nullopt);
  state->set_next_double_normal_sample(std::nullopt);
  state->set_engine(engine);
  return engine.seed();
}

// Returns the prefix of a later micro-batch, whose number is the last part of a prefix.
static std::string advance(std::string_view prefix, uint64_t microbatches) {
  std::string later(prefix);
  if (later.size() < sizeof(int64_t)) return later;
  char* const last = later.data() + later.size() - sizeof(int64_t);
  uint64_t microbatch;
  std::memcpy(&microbatch, last, sizeof(microbatch));
  microbatch += microbatches;
  std::memcpy(last, &microbatch, sizeof(microbatch));
  return later;
}

// Returns the engine of scope `number`; makes it and the following ones if it is not there.
const at::mt19937& ScopeSeeder::find_engine(std::string_view prefix, size_t number) {
  for (size_t n = 0; n < keys_.size(); ++n)
    if (keys_[n].second == scopes_[number] && keys_[n].first == prefix) return engines_[n];
  keys_.clear();
  std::vector<std::pair<std::string, int64_t>> keys;
  std::array<at::mt19937_data_pod, kTogether> states;
  std::array<uint32_t, kTogether> words;
  for (size_t n = 0; n < kTogether; ++n, ++number) {
    const int64_t scope = scopes_[number % scopes_.size()];
    const auto& key = keys.emplace_back(advance(prefix, number / scopes_.size()), scope);
    const uint64_t seed = find_seed(key.first, scope, 0);
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
  for (size_t n = 0; n < kTogether; ++n) engines_[n].set_data(states[n]);
  keys_ = std::move(keys);
  return engines_[0];
}

uint64_t ScopeSeeder::begin(std::string_view prefix, int64_t scope) {
  CHECK_ARGUMENT(prefix.size() >= sizeof(int64_t), "the prefix has no micro-batch");
  const uint64_t seed = this->seed(prefix, scope, 0);
  if (!has_numpy()) {
    seed_others_(py::cast(this, py::return_value_policy::reference), seed);
    return seed;
  }
  seed_python(prefix, scope, seed);
  const auto known = std::find(scopes_.begin(), scopes_.end(), scope);
  seed_numpy(known == scopes_.end()
                 ? at::mt19937(seed)
                 : find_engine(prefix, static_cast<size_t>(known - scopes_.begin())));
  return seed;
}

void ScopeSeeder::seed_python(std::string_view prefix, int64_t scope, uint64_t seed) {
  static PyObject* const second = PyUnicode_InternFromString("gauss_next");
  auto known = std::find(python_seeds_.begin(), python_seeds_.end(), seed);
  if (known == python_seeds_.end()) {
    prepare_python(prefix, scope);
    known = python_seeds_.begin();
  }
  const Words& words = python_words_[static_cast<size_t>(known - python_seeds_.begin())];
  python_memory_[0] = at::MERSENNE_STATE_N;
  std::memcpy(python_memory_ + 1, words.data(), sizeof(words));
  py::setattr(python_, second, py::none());
}

void ScopeSeeder::prepare_python(std::string_view prefix, int64_t scope) {
  constexpr uint32_t kWords = at::MERSENNE_STATE_N;
  static const Words initial = [] {
    Words words;
    words[0] = 19650218;
    for (uint32_t j = 1; j < kWords; ++j)
      words[j] = 1812433253 * (words[j - 1] ^ (words[j - 1] >> 30)) + j;
    return words;
  }();
  python_seeds_.clear();
  std::array<std::array<uint32_t, 2>, kTogether> terms;  // added in turn
  for (size_t n = 0; n < kTogether; ++n) {
    const uint64_t seed = python_seeds_.emplace_back(find_seed(advance(prefix, n), scope, 0));
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

void ScopeSeeder::seed_numpy(const at::mt19937& engine) {
  const auto words = engine.data().state_;
  lock_.attr("acquire")();  // numpy's functions draw without the interpreter's lock
  std::memcpy(numpy_memory_, words.data(), sizeof(words));
  numpy_memory_[at::MERSENNE_STATE_N] = at::MERSENNE_STATE_N;
  *numpy_second_ = {};
  lock_.attr("release")();
}

void ScopeSeeder::know_others(py::object python, uint64_t python_address, py::object numpy,
                              uint64_t numpy_address, uint64_t second_address) {
  lock_ = numpy.attr("lock");
  python_ = std::move(python);
  numpy_ = std::move(numpy);
  python_memory_ = reinterpret_cast<uint32_t*>(python_address);
  numpy_memory_ = reinterpret_cast<uint32_t*>(numpy_address);
  numpy_second_ = reinterpret_cast<SecondNumber*>(second_address);
}

static constexpr size_t kMemory = (at::MERSENNE_STATE_N + 1) * sizeof(uint32_t);

py::object ScopeSeeder::read_others() const {
  if (!has_numpy()) return py::none();
  return py::make_tuple(py::bytes(reinterpret_cast<const char*>(python_memory_), kMemory),
                        python_.attr("gauss_next"),
                        py::bytes(reinterpret_cast<const char*>(numpy_memory_), kMemory),
                        numpy_second_->has_value, numpy_second_->value);
}

void ScopeSeeder::write_others(const py::tuple& states) {
  std::memcpy(python_memory_, PyBytes_AsString(states[0].ptr()), kMemory);
  python_.attr("gauss_next") = states[1];
  const SecondNumber second{states[3].cast<int>(), states[4].cast<double>()};
  lock_.attr("acquire")();
  std::memcpy(numpy_memory_, PyBytes_AsString(states[2].ptr()), kMemory);
  *numpy_second_ = second;
  lock_.attr("release")();
}

namespace {

bool is_usual(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.scalar_type() == parameter.scalar_type() && gradient.layout() == at::kStrided &&
         !gradient.requires_grad() && gradient.strides() == parameter.strides() &&
         !gradient.is_conj() && !gradient.is_neg();
}

}  // namespace

bool accumulate_gradients(const std::vector<at::Tensor>& parameters, const py::dict& nodes,
                          py::object node, const py::sequence& siblings,
                          const py::dict& destinations) {
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowAutograd below_autograd;  // which would only pass the tensors on
  const size_t count = parameters.size();
  std::vector<size_t> held;
  std::vector<at::Tensor> added;
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    if (!gradient.defined()) continue;
    if (!is_usual(gradient, parameters[i])) return false;
    held.push_back(i);
    added.push_back(gradient);
  }
  std::vector<py::object> taken;
  std::vector<std::vector<at::Tensor>> lefts;
  for (const py::handle pair : siblings) {
    const py::tuple relatives = py::reinterpret_borrow<py::tuple>(pair);
    if (!nodes.contains(relatives[0])) break;
    const py::list values = nodes[relatives[0]];
    std::vector<at::Tensor>& left = lefts.emplace_back();
    for (size_t i = 0, next = 0; i < count; ++i) {
      const bool is_held = next < held.size() && held[next] == i;
      if (is_held == values[i].is_none()) return false;
      if (is_held) left.push_back(values[held[next++]].cast<at::Tensor>());
    }
    taken.push_back(relatives[0]);
    node = relatives[1];
  }
  std::vector<std::optional<at::Tensor>> outs(held.size());
  if (!lefts.empty() && destinations.contains(node)) {
    const py::dict memory = destinations[node];
    for (size_t n = 0; n < held.size(); ++n)
      if (const py::int_ i(held[n]); memory.contains(i)) outs[n] = memory[i].cast<at::Tensor>();
  }
  for (const size_t i : held) parameters[i].mutable_grad() = at::Tensor();
  {
    const py::gil_scoped_release release;
    const bool has_outs = std::any_of(outs.begin(), outs.end(), [](auto& out) { return !!out; });
    for (size_t number = 0; number < lefts.size() && !held.empty(); ++number) {
      std::vector<at::Tensor>& left = lefts[number];
      if (number + 1 < lefts.size() || !has_outs) {
        at::_foreach_add_(left, added);
        added = left;
        continue;
      }
      for (size_t n = 0; n < held.size(); ++n) {
        at::Tensor out = outs[n].value_or(left[n]);
        added[n] = at::add_out(out, left[n], added[n]);
      }
    }
  }
  py::list sums(count);
  for (size_t i = 0; i < count; ++i) sums[i] = py::none();
  for (size_t n = 0; n < held.size(); ++n) sums[held[n]] = added[n];
  for (const py::object& sibling : taken) PyDict_DelItem(nodes.ptr(), sibling.ptr());
  nodes[node] = sums;
  return true;
}

std::optional<std::vector<double>> compute_norms(const std::vector<at::Tensor>& gradients) {
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // nobody sees these views
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
