#include "recorded_calls.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "free_rows.h"
#include "segmented_loss.h"

namespace py = pybind11;

namespace lockstep {
namespace {

py::object describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::cast(CallTensor{});
  const bool is_strided = tensor.layout() == at::kStrided;
  const bool is_dense = is_strided && tensor.is_non_overlapping_and_dense() && !tensor.is_neg();
  return py::cast(CallTensor{
      tensor.sizes().vec(), is_strided ? tensor.strides().vec() : std::vector<int64_t>(),
      static_cast<int64_t>(tensor.element_size()), tensor.is_floating_point(), is_dense});
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

// Returns whether the bits of a tensor can be read.
bool is_readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.is_cpu();
}

TensorBits read_bits(const at::Tensor& tensor) {
  if (!is_readable(tensor)) return {};
  return {tensor.scalar_type(), tensor.sizes().vec(), hash_bits(tensor)};
}

// Returns the numbers of turns by which `one` may be the rows of the first micro-batch.
std::vector<int64_t> compare_first(const TensorBits& one, const at::Tensor& several) {
  const bool is_plain = one.hash && is_readable(several) && one.type == several.scalar_type();
  if (!is_plain || c10::multiply_integers(one.sizes) == 0) return {};
  const std::optional<int64_t> grown = find_grown(one.sizes, several.sizes());
  if (!grown) return {};
  const int64_t segments = several.size(*grown) / one.sizes[static_cast<size_t>(*grown)];
  return find_turns(several, *grown, 0, segments, *one.hash);
}

template <typename Value>
bool has_any(TensorMap<Value>& known, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.defined() && known.find(tensor);
  });
}

// Returns whether the rows of each micro-batch follow each other in all arguments that have rows.
bool are_together(const Stack& stack, size_t count, const CallArguments& alone,
                  const std::vector<int64_t>& turns) {
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  for (size_t i = 0; i < tensors.size() && i < alone.sizes.size(); ++i)
    if (tensors[i].defined() && tensors[i].sizes() != at::IntArrayRef(alone.sizes[i]) &&
        turns[i] != 1 && turns[i] != kAnyTurns)
      return false;
  return true;
}

}  // namespace

void RecordedCalls::call(const c10::OperatorHandle& op, Stack* stack) {
  const py::gil_scoped_acquire gil;  // torch has released it
  if (has_subclass(*stack, op.schema().arguments().size())) {
    if (keeps_) kept_.emplace_back();
    op.callBoxed(stack);
    note_subclass(op);
    return;
  }
  const size_t count = op.schema().arguments().size(), returns = op.schema().returns().size();
  py::list arguments = describe_last(*stack, count);
  py::list turns = compare_arguments(*stack, count);
  py::list sources = find_sources(*stack, count);
  auto described = std::make_unique<CallArguments>(describe_arguments(op, *stack));
  const py::capsule values(described.release(),
                           [](void* held) { delete static_cast<CallArguments*>(held); });
  const CallArguments* const alone = find_alone(op);
  const bool has_same_numbers = !alone || has_numbers(op, *stack, *alone);
  Stack given;
  if (alone) given.assign(stack->end() - std::ssize(op.schema().arguments()), stack->end());
  DefaultGenerator generator;
  const std::vector<at::Tensor> tensors = list_tensors(*stack, count);
  const bool is_of_samples = has_any(of_samples_, tensors);
  const std::vector<int64_t> given_turns = list_turns(*stack, count);
  const bool is_in_order =
      !alone || !has_samples_ || are_together(*stack, count, *alone, given_turns);
  const bool is_loss_call = joins_losses() && is_of_samples && is_loss(op, *stack) && is_in_order;
  const bool has_losses = has_any(losses_, tensors);
  const bool keeps = has_losses && keeps_losses(op, tensors, losses_);
  const bool is_divided =
      (alone && is_in_order && try_batch_norm(op, stack, alone->sizes, statistics_)) ||
      (joins_losses() && try_loss(op, stack, alone ? &alone->sizes : nullptr, is_loss_call));
  if (!is_divided) op.callBoxed(stack);
  if (has_subclass(*stack, returns)) return note_subclass(op);
  remember_results(*stack, returns, is_of_samples);
  const bool has_drawn = generator.has_drawn();
  if (has_drawn) {
    repeat_draw(*stack);
    note_draw(generator.before(), generator.read());
  }
  RowTurns rows = {true, std::vector<int64_t>(returns, 1)};
  if (alone && !has_drawn && !is_divided) rows = compare_rows(op, given, *alone, given_turns);
  std::vector<RowOrder> orders;
  for (const int64_t one : rows.turns) orders.push_back({0, one});
  const bool is_same = compare_results(*stack, returns, orders) && has_same_numbers &&
                       rows.are_free && (!alone || is_divided || !has_losses || keeps);
  if (has_samples_ && op.schema().is_mutable())
    note_writes(tensors, given_turns, *stack, returns, orders);
  note_results(*stack, returns, orders, is_loss_call || keeps);
  calls.append(py::make_tuple(op.schema().name(), op.schema().overload_name(), std::move(arguments),
                              describe_last(*stack, returns), has_drawn, std::move(turns),
                              std::move(sources), is_same, values));
}

// Returns, in a pass over all micro-batches, the arguments of this call in that over the first one;
// nullptr if it is another one there.
const CallArguments* RecordedCalls::find_alone(const c10::OperatorHandle& op) const {
  if (!first_ || (!first_->first_ && !first_->keeps_)) return nullptr;
  const RecordedCalls& alone = first_->first_ ? *first_->first_ : *first_;
  if (py::len(calls) >= py::len(alone.calls)) return nullptr;
  const auto call = py::cast<py::tuple>(alone.calls[py::len(calls)]);
  const bool is_same = py::cast<std::string>(call[0]) == op.schema().name() &&
                       py::cast<std::string>(call[1]) == op.schema().overload_name();
  const py::object values = call[py::len(call) - 1];
  if (!is_same || values.is_none()) return nullptr;
  return py::cast<py::capsule>(values).get_pointer<CallArguments>();
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
// micro-batch have those of their own passes. Completes the orders of the rows: those that are not
// known are the only ones that fit.
bool RecordedCalls::compare_results(const Stack& stack, size_t count,
                                    std::vector<RowOrder>& orders) {
  if (keeps_ || (first_ && first_->keeps_)) return true;  // a backward pass
  const auto number = static_cast<size_t>(py::len(calls));
  const at::NoGradGuard guard;
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  orders.resize(tensors.size());
  const RecordedCalls* const last = first_.get();
  const RecordedCalls* const first = last && last->first_ ? last->first_.get() : last;
  const auto has_call = [&](const RecordedCalls* one) {
    return one && number < one->results_.size() && one->results_[number].size() == tensors.size();
  };
  const bool is_comparable = has_call(first) && has_call(last);
  std::vector<TensorBits> bits(tensors.size());
  bool is_same = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!is_readable(tensor)) continue;
    bits[i] = {tensor.scalar_type(), tensor.sizes().vec(), std::nullopt};
    const std::vector<int64_t>* const one =
        is_comparable ? &first->results_[number][i].sizes : nullptr;
    if (!one || *one == bits[i].sizes || one->size() != bits[i].sizes.size()) {
      bits[i].hash = hash_bits(tensor);
      continue;
    }
    const std::optional<int64_t> grown = find_grown(*one, tensor.sizes());
    if (!grown) continue;  // other shapes are refused for what they are
    const int64_t rows = (*one)[static_cast<size_t>(*grown)], segments = tensor.size(*grown) / rows;
    const auto has_bits = [&](const RecordedCalls* pass, int64_t segment, int64_t turns) {
      const at::Tensor taken = take_rows(tensor, *grown, segment, segments, turns);
      const TensorBits& own = pass->results_[number][i];
      return taken.sizes() == own.sizes && hash_bits(taken) == own.hash;
    };
    orders[i].rows = tensor.size(*grown);
    std::vector<int64_t> fitting;
    const int64_t known = orders[i].turns;
    for (int64_t turns = std::max<int64_t>(1, known); turns <= (known > 0 ? known : rows); ++turns)
      if (rows % turns == 0 && has_bits(first, 0, turns) &&
          (first == last || has_bits(last, segments - 1, turns)))
        fitting.push_back(turns);
    is_same = is_same && !fitting.empty();
    if (known == kUnknownTurns && fitting.size() == 1) orders[i].turns = fitting.front();
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

void RecordedCalls::remember_results(const Stack& stack, size_t count, bool is_of_samples) {
  const auto number = static_cast<int64_t>(py::len(calls));
  for (const at::Tensor& tensor : list_tensors(stack, count)) {
    if (!tensor.defined()) continue;
    returned_.set(tensor, number);
    if (is_of_samples) of_samples_.set(tensor, true);
  }
}

void RecordedCalls::note_samples(const std::vector<at::Tensor>& tensors) {
  has_samples_ = true;
  for (const at::Tensor& tensor : tensors) {
    of_samples_.set(tensor, true);
    orders_.set(tensor, {tensor.size(0), 1});
  }
}

bool RecordedCalls::is_in_order(const at::Tensor& tensor) {
  const RowOrder* const order = tensor.defined() ? orders_.find(tensor) : nullptr;
  return !order || order->turns == 1 || order->turns == kAnyTurns;
}

// Notes how the rows of results follow each other, and whether these are losses.
void RecordedCalls::note_results(const Stack& stack, size_t count, const std::vector<RowOrder>& own,
                                 bool are_losses) {
  if (!has_samples_) return;
  const std::vector<at::Tensor> results = list_tensors(stack, count);
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) continue;
    const RowOrder order = i < own.size() ? own[i] : RowOrder();
    orders_.set(results[i], order);
    if (order.rows) orders.emplace(order.rows, order.turns);
    if (are_losses) losses_.set(results[i], true);
  }
}

// Notes that tensors which share the memory of a written one have its rows, too, if these were
// written in another order than they had.
void RecordedCalls::note_writes(const std::vector<at::Tensor>& given,
                                const std::vector<int64_t>& given_turns, const Stack& stack,
                                size_t count, const std::vector<RowOrder>& own) {
  const std::vector<at::Tensor> results = list_tensors(stack, count);
  for (size_t i = 0; i < results.size() && i < own.size(); ++i) {
    const at::Tensor& written = results[i];
    const auto place = std::find_if(given.begin(), given.end(), [&](const at::Tensor& one) {
      return one.defined() && one.is_same(written);
    });
    if (place == given.end() || !written.has_storage()) continue;
    if (given_turns[static_cast<size_t>(place - given.begin())] == own[i].turns) continue;
    orders_.visit([&](c10::TensorImpl& tensor, RowOrder& order) {
      const bool is_shared =
          tensor.has_storage() && tensor.storage().is_alias_of(written.storage());
      if (!is_shared || &tensor == written.unsafeGetTensorImpl()) return;
      const bool is_alike = order.rows == own[i].rows && own[i].turns == 1;
      order.turns = is_alike ? 1 : kMixedTurns;
    });
  }
}

// Returns by how many turns the rows of arguments alternate, as RowTurns describes it.
std::vector<int64_t> RecordedCalls::list_turns(const Stack& stack, size_t count) {
  std::vector<int64_t> found;
  for (const at::Tensor& tensor : list_tensors(stack, count)) {
    const RowOrder* const order = tensor.defined() ? orders_.find(tensor) : nullptr;
    found.push_back(order ? order->turns : kUnknownTurns);
  }
  return found;
}

py::list RecordedCalls::compare_arguments(const Stack& stack, size_t count) {
  py::list turns;
  const auto number = static_cast<size_t>(py::len(calls));
  std::vector<at::Tensor> tensors;
  if (keeps_ || first_) tensors = list_tensors(stack, count);
  const at::NoGradGuard guard;
  if (first_ && number < first_->kept_.size() && first_->kept_[number].size() == tensors.size()) {
    for (size_t i = 0; i < tensors.size(); ++i)
      turns.append(compare_first(first_->kept_[number][i], tensors[i]));
  }
  if (keeps_) {
    std::vector<TensorBits>& kept = kept_.emplace_back();
    for (const at::Tensor& tensor : tensors) kept.push_back(read_bits(tensor));
  }
  return turns;
}

}  // namespace lockstep
