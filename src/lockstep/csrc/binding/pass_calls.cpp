#include "pass_calls.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "torch_errors.h"

namespace py = pybind11;

namespace lockstep {
namespace {

constexpr uintptr_t kAlignment = 64;  // of the memory that torch allocates

// torch has this key for operators that are seen before any other key, also before autograd.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local PassCalls* watching = nullptr;
thread_local std::shared_ptr<PassCalls> begun;  // which sees until its end

void end_begun() {
  watching = nullptr;
  begun.reset();
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

// Operators that draw, by calling others.
const std::unordered_set<std::string> kDividedDraws = {
    "aten::alpha_dropout",
    "aten::alpha_dropout_",
    "aten::dropout",
    "aten::dropout_",
    "aten::feature_alpha_dropout",
    "aten::feature_alpha_dropout_",
    "aten::feature_dropout",
    "aten::feature_dropout_",
    "aten::rand",
    "aten::rand_like",
    "aten::randint",
    "aten::randint_like",
    "aten::randn",
    "aten::randn_like",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_attention_math",
};

bool is_divided(const c10::OperatorHandle& op, const Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  if (!kDividedDraws.contains(schema.name())) return false;
  const std::optional<int> probability = schema.argumentIndexWithName("dropout_p");
  if (!probability) return true;
  const size_t first = stack.size() - schema.arguments().size();
  return stack[first + static_cast<size_t>(*probability)].toDouble() != 0;
}

void call_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (begun && begun->has_ended()) end_begun();
  if (watching && is_divided(op, *stack)) {
    const c10::DispatchKeySet lower(c10::DispatchKeySet::FULL_AFTER, kKey);
    op.redispatchBoxed(keys & lower, stack);  // what it calls is seen
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  if (watching)
    watching->call(op, stack);
  else
    op.callBoxed(stack);
}

void register_key() {
  static const torch::Library* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&call_watched>());
    return made;
  }();
  (void)library;
}

class Watching {
 public:
  explicit Watching(PassCalls* calls) : before_(watching), include_(kKey) { watching = calls; }
  ~Watching() { watching = before_; }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  PassCalls* before_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

py::object describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::cast(CallTensor{});
  const bool is_dense =
      tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() && !tensor.is_neg();
  return py::cast(CallTensor{tensor.sizes().vec(), static_cast<int64_t>(tensor.element_size()),
                             tensor.is_floating_point(), is_dense});
}

py::object describe(const c10::IValue& value) {
  if (value.isTensor()) return describe(value.toTensor());
  if (!value.isTensorList() && !value.isOptionalTensorList()) return torch::jit::toPyObject(value);
  py::list parts;
  for (const c10::IValue& part : value.toListRef())
    parts.append(part.isNone() ? describe(at::Tensor()) : describe(part));
  return std::move(parts);
}

py::list describe_last(const Stack& stack, size_t count) {
  py::list described;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) described.append(describe(stack[i]));
  return described;
}

// The default generator, to find out which operators draw from it.
class DefaultGenerator {
 public:
  DefaultGenerator() : generator_(at::detail::getDefaultCPUGenerator()), state_(read()) {}

  bool has_drawn() { return !is_same_state(read(), state_); }
  const at::Tensor& before() const { return state_; }
  void restore(const at::Tensor& state) {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(state);
  }

  at::Tensor read() {
    const std::scoped_lock lock(generator_.mutex());
    return generator_.get_state();
  }
  static bool is_same_state(const at::Tensor& one, const at::Tensor& other) {
    const auto bytes = static_cast<size_t>(one.nbytes());
    return std::memcmp(one.const_data_ptr(), other.const_data_ptr(), bytes) == 0;
  }

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// Adds tensors along the tree, in the memory of the left one.
class TreeSum {
 public:
  void add(at::Tensor value) {
    for (uint64_t leaf = leaves_++; leaf & 1; leaf >>= 1) value = join(take(), std::move(value));
    held_.push_back(std::move(value));
  }
  at::Tensor total() {
    while (held_.size() > 1) {
      at::Tensor right = take();
      held_.push_back(join(take(), std::move(right)));
    }
    return take();
  }

 private:
  at::Tensor take() {
    at::Tensor last = std::move(held_.back());
    held_.pop_back();
    return last;
  }
  static at::Tensor join(at::Tensor left, at::Tensor right) {
    // Some operators return their argument.
    const bool is_own = left.storage().use_count() == 1;
    return is_own ? left.add_(right) : at::add(left, right);
  }
  uint64_t leaves_ = 0;
  std::vector<at::Tensor> held_;
};

// The rows of one micro-batch, aligned as those of a separate pass.
at::Tensor take_rows(const at::Tensor& tensor, int64_t dimension, int64_t segment, int64_t segments,
                     int64_t turns = 1) {
  const int64_t rows = tensor.size(dimension) / segments;
  if (turns > 1)
    return tensor.unflatten(dimension, {turns, segments, rows / turns})
        .select(dimension + 1, segment)
        .clone()
        .flatten(dimension, dimension + 1);
  at::Tensor part = tensor.narrow(dimension, segment * rows, rows);
  const auto address = reinterpret_cast<uintptr_t>(part.const_data_ptr());
  // With time first, the rows are apart, and some kernels add them in another order, or read what
  // is between them.
  const bool is_apart =
      tensor.is_non_overlapping_and_dense() && !part.is_non_overlapping_and_dense();
  return address % kAlignment || is_apart ? part.clone() : part;
}

// The rows of all micro-batches.
at::Tensor join_rows(const std::vector<at::Tensor>& rows, int64_t dimension, int64_t turns) {
  if (turns == 1) return at::cat(rows, dimension);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& one : rows)
    parts.push_back(one.unflatten(dimension, {turns, one.size(dimension) / turns}));
  return at::stack(parts, dimension + 1).flatten(dimension, dimension + 2);
}

// Returns whether the bits of a tensor can be read.
bool is_readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.is_cpu();
}

// Also NaN has bits, so results are compared by these.
uint64_t hash_bits(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  const auto* data = static_cast<const char*>(plain.const_data_ptr());
  const auto bytes = static_cast<size_t>(plain.nbytes());
  uint64_t hash = bytes;
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, std::min(sizeof word, bytes - i));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  }
  return hash;
}

PlainArguments list_plain_arguments(const Stack& stack, size_t count) {
  PlainArguments arguments;
  const size_t first = stack.size() - count;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[first + i];
    if (!value.isTensor() && !value.isTensorList() && !value.isOptionalTensorList())
      arguments.emplace_back(i, value);
  }
  return arguments;
}

// Returns whether an argument is as in the pass that was planned. A factor may be another one, as
// it is the same for all samples; an integer may be a position, a size or a dimension.
bool is_same_value(const c10::IValue& one, const c10::IValue& other) {
  if (one.isDouble() || other.isDouble()) return !other.isNone() && !one.isNone();
  if (one.isInt()) return other.isInt() && one.toInt() == other.toInt();
  if (one.isBool()) return other.isBool() && one.toBool() == other.toBool();
  if (one.isString()) return other.isString() && one.toStringRef() == other.toStringRef();
  if (one.isIntList()) return other.isIntList() && one.toIntVector() == other.toIntVector();
  if (one.isBoolList()) return other.isBoolList() && one.toBoolList() == other.toBoolList();
  return one.isNone() == other.isNone();
}

// Returns the numbers of turns by which `one` may be the rows of the first micro-batch.
std::vector<int64_t> find_turns(const at::Tensor& one, const at::Tensor& several) {
  std::vector<int64_t> found;
  const bool is_plain = one.defined() && several.defined() && one.dim() == several.dim() &&
                        one.layout() == at::kStrided && several.layout() == at::kStrided &&
                        one.scalar_type() == several.scalar_type();
  if (!is_plain || one.numel() == 0) return found;
  std::optional<int64_t> grown;
  for (int64_t d = 0; d < one.dim(); ++d) {
    if (one.size(d) == several.size(d)) continue;
    if (grown || several.size(d) % one.size(d)) return found;
    grown = d;
  }
  if (!grown) return found;
  const int64_t rows = one.size(*grown);
  for (int64_t turns = 1; turns <= rows; ++turns) {
    if (rows % turns) continue;
    const at::Tensor taken = take_rows(several, *grown, 0, several.size(*grown) / rows, turns);
    if (at::equal(taken, one)) found.push_back(turns);
  }
  return found;
}

template <typename Change>
void change_tensors(Stack& arguments, const Change& change) {
  size_t position = 0;
  for (c10::IValue& value : arguments) {
    if (value.isTensor()) {
      value = change(value.toTensor(), position++);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& part : value.toTensorVector())
        changed.push_back(change(part, position++));
      value = changed;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> changed;
      for (const std::optional<at::Tensor>& part : value.toOptionalTensorVector()) {
        if (part)
          changed.push_back(change(*part, position));
        else
          changed.push_back(std::nullopt);
        ++position;
      }
      value = changed;
    }
  }
}

// The tensors among the last values of a stack.
std::vector<at::Tensor> list_tensors(const Stack& stack, size_t count) {
  Stack last(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  std::vector<at::Tensor> tensors;
  change_tensors(last, [&](const at::Tensor& tensor, size_t) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

// Returns whether a tensor has a class of its own, such as those with which a function is compiled,
// which have no memory.
bool has_subclass(const Stack& stack, size_t count) {
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
  });
}

// Returns whether an operator writes its first argument, and returns it.
bool is_in_place(const c10::OperatorHandle& op) {
  const c10::AliasInfo* alias = op.schema().arguments().front().alias_info();
  return alias && alias->isWrite();
}

// Returns whether the arguments that are no tensors are those of the pass that was planned.
bool has_arguments(const c10::OperatorHandle& op, const Stack& stack,
                   const PlainArguments& expected) {
  const size_t first = stack.size() - op.schema().arguments().size();
  return std::all_of(expected.begin(), expected.end(), [&](const auto& argument) {
    const c10::IValue& value = stack[first + argument.first];
    return !value.isTensor() && is_same_value(argument.second, value);
  });
}

bool can_be_cut(const Stack& stack, size_t count, const SegmentRule& rule, int64_t segments) {
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  for (const auto& [position, dimension] : rule.slices)
    if (position >= tensors.size() || !tensors[position].defined() ||
        dimension >= tensors[position].dim() ||
        tensors[position].size(dimension) % (segments * rule.turns) ||
        (rule.draws && tensors[position].requires_grad()))
      return false;
  return true;
}

}  // namespace

py::object PassCalls::run(const py::function& body) {
  register_key();
  const Watching guard(this);
  return body();
}

void PassCalls::begin() {
  if (begun && begun->has_ended()) end_begun();
  CHECK_ARGUMENT(!watching, "another pass is seen in this thread");
  register_key();
  has_ended_ = false;
  begun = shared_from_this();
  watching = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void PassCalls::end() {
  has_ended_ = true;
  if (begun.get() == this) end_begun();
}

void RecordedCalls::call(const c10::OperatorHandle& op, Stack* stack) {
  const py::gil_scoped_acquire gil;  // torch has released it
  if (has_subclass(*stack, op.schema().arguments().size())) {
    if (keeps_) kept_.emplace_back();
    op.callBoxed(stack);
    note_subclass(op);
    return;
  }
  py::list arguments = describe_last(*stack, op.schema().arguments().size());
  py::list turns = compare_arguments(*stack, op.schema().arguments().size());
  py::list sources = find_sources(*stack, op.schema().arguments().size());
  auto plain = std::make_unique<PlainArguments>(
      list_plain_arguments(*stack, op.schema().arguments().size()));
  const py::capsule values(plain.release(),
                           [](void* held) { delete static_cast<PlainArguments*>(held); });
  DefaultGenerator generator;
  op.callBoxed(stack);
  if (has_subclass(*stack, op.schema().returns().size())) return note_subclass(op);
  remember_results(*stack, op.schema().returns().size());
  const bool has_drawn = generator.has_drawn();
  if (has_drawn) {
    repeat_draw(*stack);
    note_draw(generator.before(), generator.read());
  }
  const bool is_same = compare_results(*stack, op.schema().returns().size());
  calls.append(py::make_tuple(op.schema().name(), op.schema().overload_name(), std::move(arguments),
                              describe_last(*stack, op.schema().returns().size()), has_drawn,
                              std::move(turns), std::move(sources), is_same, values));
}

void RecordedCalls::note_subclass(const c10::OperatorHandle& op) {
  results_.emplace_back();
  calls.append(py::make_tuple(op.schema().name(), op.schema().overload_name(), py::list(),
                              py::list(), false, py::list(), py::list(), false, py::none()));
}

py::object RecordedCalls::run(const py::function& body) {
  try {
    py::object result = PassCalls::run(body);
    restore_generator();
    return result;
  } catch (...) {
    restore_generator();
    throw;
  }
}

void RecordedCalls::end() {
  PassCalls::end();
  restore_generator();
}

// Restoring the generator after each draw would let a loop that rejects numbers draw the same ones
// forever.
void RecordedCalls::note_draw(const at::Tensor& before, at::Tensor after) {
  if (!first_state_.defined())
    first_state_ = before;
  else if (!DefaultGenerator::is_same_state(before, last_state_))
    has_other_draws_ = true;
  last_state_ = std::move(after);
}

void RecordedCalls::restore_generator() {
  const at::Tensor state = std::exchange(first_state_, at::Tensor());
  if (!restores_ || !state.defined() || has_other_draws_) return;
  DefaultGenerator generator;
  if (DefaultGenerator::is_same_state(generator.before(), last_state_)) generator.restore(state);
}

void RecordedCalls::repeat_draw(const Stack& stack) {
  const auto number = static_cast<int64_t>(py::len(calls));
  if (stack.empty() || !stack.back().isTensor()) return;
  const at::NoGradGuard guard;
  const at::Tensor result = stack.back().toTensor();
  const auto repeat = [&](const RecordedCalls& one, bool is_last) {
    const auto drawn = one.drawn_.find(number);
    if (drawn == one.drawn_.end() || drawn->second.dim() != result.dim()) return;
    at::Tensor rows = result;
    for (int64_t d = 0; d < result.dim(); ++d) {
      const int64_t size = std::min(result.size(d), drawn->second.size(d));
      rows = rows.narrow(d, is_last ? result.size(d) - size : 0, size);
    }
    if (rows.sizes() == drawn->second.sizes()) rows.copy_(drawn->second);
  };
  // A pass that does not restore the generator is one whose results count.
  if (first_ && restores_) {
    repeat(*first_, first_->first_ != nullptr);
    if (first_->first_) repeat(*first_->first_, false);
  }
  drawn_[number] = result.clone();
}

// Keeps the bits of the results, and returns whether the rows of the first and of the last
// micro-batch have those of their own passes.
bool RecordedCalls::compare_results(const Stack& stack, size_t count) {
  if (keeps_ || (first_ && first_->keeps_)) return true;  // a backward pass
  const auto number = static_cast<size_t>(py::len(calls));
  const at::NoGradGuard guard;
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  const RecordedCalls* const last = first_.get();
  const RecordedCalls* const first = last && last->first_ ? last->first_.get() : last;
  const auto has_call = [&](const RecordedCalls* one) {
    return one && number < one->results_.size() && one->results_[number].size() == tensors.size();
  };
  const bool is_comparable = has_call(first) && has_call(last);
  std::vector<Bits> bits(tensors.size());
  bool is_same = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!is_readable(tensor)) continue;
    bits[i] = {tensor.sizes().vec(), 0};
    const std::vector<int64_t>* const one =
        is_comparable ? &first->results_[number][i].sizes : nullptr;
    if (!one || *one == bits[i].sizes || one->size() != bits[i].sizes.size()) {
      bits[i].hash = hash_bits(tensor);
      continue;
    }
    const auto differing = std::mismatch(one->begin(), one->end(), bits[i].sizes.begin()).first;
    const int64_t dimension = differing - one->begin(), rows = *differing;
    // Other shapes are refused for what they are.
    if (rows == 0 || tensor.size(dimension) % rows) continue;
    const int64_t segments = tensor.size(dimension) / rows;
    const auto has_bits = [&](const RecordedCalls* pass, int64_t segment, int64_t turns) {
      const at::Tensor taken = take_rows(tensor, dimension, segment, segments, turns);
      const Bits& own = pass->results_[number][i];
      return taken.sizes() == own.sizes && hash_bits(taken) == own.hash;
    };
    bool is_found = false;
    for (int64_t turns = 1; turns <= rows && !is_found; ++turns)
      is_found = rows % turns == 0 && has_bits(first, 0, turns) &&
                 (first == last || has_bits(last, segments - 1, turns));
    is_same = is_same && is_found;
  }
  results_.push_back(std::move(bits));
  return is_same;
}

py::list RecordedCalls::find_sources(const Stack& stack, size_t count) {
  py::list sources;
  for (const at::Tensor& tensor : list_tensors(stack, count)) {
    const int64_t* const call = tensor.defined() ? returned_.find(tensor) : nullptr;
    sources.append(call ? *call : -1);
  }
  return sources;
}

void RecordedCalls::remember_results(const Stack& stack, size_t count) {
  const auto number = static_cast<int64_t>(py::len(calls));
  for (const at::Tensor& tensor : list_tensors(stack, count))
    if (tensor.defined()) returned_.set(tensor, number);
}

py::list RecordedCalls::compare_arguments(const Stack& stack, size_t count) {
  py::list turns;
  const auto number = static_cast<size_t>(py::len(calls));
  std::vector<at::Tensor> tensors;
  if (keeps_ || first_) tensors = list_tensors(stack, count);
  const at::NoGradGuard guard;
  if (first_ && number < first_->kept_.size() && first_->kept_[number].size() == tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i)
      turns.append(find_turns(first_->kept_[number][i], tensors[i]));
  }
  if (keeps_) {
    for (at::Tensor& tensor : tensors)
      if (tensor.defined()) tensor = tensor.clone();  // others may write it
    kept_.push_back(std::move(tensors));
  }
  return turns;
}

SegmentedCalls::SegmentedCalls(const std::vector<Expected>& calls, int64_t segments)
    : segments_(segments) {
  CHECK_ARGUMENT(segments > 0, "there are no segments");
  for (const auto& [name, overload, rule, arguments] : calls)
    calls_.push_back(
        {c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), rule,
         *arguments.get_pointer<PlainArguments>()});
  const bool has_draws = std::any_of(
      calls_.begin(), calls_.end(), [](const Call& call) { return call.rule && call.rule->draws; });
  for (int64_t i = 0; has_draws && i < segments; ++i)
    generators_.push_back(at::detail::createCPUGenerator());
}

void SegmentedCalls::seed(const std::vector<uint64_t>& seeds) {
  if (generators_.empty()) return;
  CHECK_ARGUMENT(seeds.size() == generators_.size(), "there is not one seed per segment");
  for (size_t i = 0; i < seeds.size(); ++i) generators_[i].set_current_seed(seeds[i]);
}

void SegmentedCalls::restart() {
  next_ = 0;
  difference_.clear();
  parts_.clear();
}

void SegmentedCalls::finish(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard guard;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    const std::vector<at::Tensor>* const parts =
        gradient.defined() ? parts_.find(gradient) : nullptr;
    if (!parts) continue;
    TreeSum sum;
    sum.add(gradient.clone());
    for (const at::Tensor& part : *parts) sum.add(part);
    parameter.mutable_grad() = sum.total();
  }
  parts_.clear();
}

std::string SegmentedCalls::find_difference() const {
  if (!difference_.empty() || next_ == calls_.size()) return difference_;
  return calls_[next_].op.schema().name();
}

void SegmentedCalls::call(const c10::OperatorHandle& op, Stack* stack) {
  const bool is_expected = next_ < calls_.size() && calls_[next_].op == op &&
                           !has_subclass(*stack, op.schema().arguments().size()) &&
                           has_arguments(op, *stack, calls_[next_].arguments);
  if (!is_expected && difference_.empty()) difference_ = op.schema().name();
  if (!difference_.empty()) {
    op.callBoxed(stack);
    return;
  }
  const std::optional<SegmentRule>& rule = calls_[next_++].rule;
  if (!rule) {
    op.callBoxed(stack);
  } else if (rule->slices.empty()) {
    call_parts(op, stack);
  } else if (can_be_cut(*stack, op.schema().arguments().size(), *rule, segments_)) {
    rule->draws ? draw(op, *rule, stack) : call_segments(op, *rule, stack);
  } else {
    difference_ = op.schema().name();
    op.callBoxed(stack);
  }
}

void SegmentedCalls::call_segments(const c10::OperatorHandle& op, const SegmentRule& rule,
                                   Stack* stack) {
  const auto arguments = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const size_t returns = op.schema().returns().size();
  const Stack given(stack->end() - arguments, stack->end());
  torch::jit::drop(*stack, static_cast<size_t>(arguments));
  std::vector<std::vector<at::Tensor>> rows(returns);
  std::vector<TreeSum> sums(returns);
  std::vector<bool> is_defined(returns);
  for (int64_t segment = 0; segment < segments_; ++segment) {
    Stack part = given;
    for (const auto& [argument, size] : rule.sizes) part[argument] = size;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      for (const auto& [sliced, dimension] : rule.slices)
        if (sliced == position) return take_rows(tensor, dimension, segment, segments_, rule.turns);
      return tensor;
    });
    op.callBoxed(&part);
    for (size_t i = 0; i < returns; ++i) {
      at::Tensor result = part[i].toTensor();
      part[i] = c10::IValue();
      is_defined[i] = result.defined();
      if (!is_defined[i]) continue;
      if (rule.results[i] < 0 && !rule.keeps_parts)
        sums[i].add(std::move(result));
      else
        rows[i].push_back(std::move(result));
    }
  }
  for (size_t i = 0; i < returns; ++i) {
    at::Tensor result;
    if (is_defined[i] && rule.results[i] >= 0) {
      result = join_rows(rows[i], rule.results[i], rule.turns);
    } else if (is_defined[i] && !rule.keeps_parts) {
      result = sums[i].total();
    } else if (is_defined[i]) {
      result = rows[i].front();
      rows[i].erase(rows[i].begin());
      parts_.set(result, std::move(rows[i]));
    }
    stack->emplace_back(std::move(result));
  }
}

// Calls an operator for the gradients of parameters of each micro-batch.
void SegmentedCalls::call_parts(const c10::OperatorHandle& op, Stack* stack) {
  const size_t arguments = op.schema().arguments().size(), returns = op.schema().returns().size();
  const Stack given(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end());
  std::vector<const std::vector<at::Tensor>*> known;
  for (const at::Tensor& tensor : list_tensors(given, arguments))
    known.push_back(tensor.defined() ? parts_.find(tensor) : nullptr);
  if (std::all_of(known.begin(), known.end(), [](const auto* parts) { return !parts; }))
    difference_ = op.schema().name();
  std::vector<std::vector<at::Tensor>> others;  // the results of each further micro-batch
  for (int64_t segment = 1; difference_.empty() && segment < segments_; ++segment) {
    Stack part = given;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      return known[position] ? (*known[position])[static_cast<size_t>(segment) - 1] : tensor;
    });
    op.callBoxed(&part);
    others.push_back(list_tensors(part, returns));
  }
  op.callBoxed(stack);
  if (others.empty()) return;
  const std::vector<at::Tensor> results = list_tensors(*stack, returns);
  for (size_t i = 0; i < results.size(); ++i) {
    std::vector<at::Tensor> parts;
    for (const std::vector<at::Tensor>& other : others) parts.push_back(other[i]);
    if (results[i].defined()) parts_.set(results[i], std::move(parts));
  }
}

// Each micro-batch draws from its own generator, into memory as that of a separate pass.
void SegmentedCalls::draw(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto generator = static_cast<size_t>(*schema.argumentIndexWithName("generator"));
  const Stack given(stack->end() - std::ssize(schema.arguments()), stack->end());
  torch::jit::drop(*stack, schema.arguments().size());
  const at::NoGradGuard guard;
  std::vector<at::Tensor> rows;
  for (int64_t segment = 0; segment < segments_; ++segment) {
    Stack part = given;
    part[generator] = generators_[static_cast<size_t>(segment)];
    for (const auto& [argument, size] : rule.sizes) part[argument] = size;
    at::Tensor written;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      for (const auto& [sliced, dimension] : rule.slices) {
        if (sliced != position) continue;
        const at::Tensor taken = take_rows(tensor, dimension, segment, segments_);
        if (position > 0 || !is_in_place(op)) return taken;
        written = tensor.narrow(dimension, segment * (tensor.size(dimension) / segments_),
                                tensor.size(dimension) / segments_);
        return taken.is_non_overlapping_and_dense() ? taken : taken.clone();
      }
      return tensor;
    });
    op.callBoxed(&part);
    at::Tensor result = part.back().toTensor();
    if (!written.defined())
      rows.push_back(std::move(result));
    else if (written.const_data_ptr() != result.const_data_ptr())
      written.copy_(result);
  }
  stack->emplace_back(is_in_place(op) ? given.front() : at::cat(rows, rule.results.front()));
}

}  // namespace lockstep
