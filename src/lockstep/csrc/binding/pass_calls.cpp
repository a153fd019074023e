#include "pass_calls.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include "torch_errors.h"

namespace py = pybind11;

namespace lockstep {
namespace {

constexpr uintptr_t kAlignment = 64;  // of the memory that torch allocates

// torch has this key for operators that are seen before any other key, also before autograd.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local PassCalls* watching = nullptr;

void call_watched(const c10::OperatorHandle& op, Stack* stack) {
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
at::Tensor take_rows(const at::Tensor& tensor, int64_t dimension, int64_t segment,
                     int64_t segments) {
  const int64_t rows = tensor.size(dimension) / segments;
  at::Tensor part = tensor.narrow(dimension, segment * rows, rows);
  const auto address = reinterpret_cast<uintptr_t>(part.const_data_ptr());
  return address % kAlignment ? part.clone() : part;
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

bool can_be_cut(const Stack& stack, size_t count, const SegmentRule& rule, int64_t segments) {
  Stack arguments(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  std::vector<at::Tensor> tensors;
  change_tensors(arguments, [&](const at::Tensor& tensor, size_t) {
    tensors.push_back(tensor);
    return tensor;
  });
  for (const auto& [position, dimension] : rule.slices)
    if (position >= tensors.size() || !tensors[position].defined() ||
        dimension >= tensors[position].dim() || tensors[position].size(dimension) % segments)
      return false;
  return true;
}

}  // namespace

py::object PassCalls::run(const py::function& body) {
  register_key();
  const Watching guard(this);
  return body();
}

void RecordedCalls::call(const c10::OperatorHandle& op, Stack* stack) {
  const py::gil_scoped_acquire gil;  // torch has released it
  py::list arguments = describe_last(*stack, op.schema().arguments().size());
  op.callBoxed(stack);
  calls.append(py::make_tuple(op.schema().name(), op.schema().overload_name(), std::move(arguments),
                              describe_last(*stack, op.schema().returns().size())));
}

SegmentedCalls::SegmentedCalls(const std::vector<Expected>& calls, int64_t segments)
    : segments_(segments) {
  CHECK_ARGUMENT(segments > 0, "there are no segments");
  for (const auto& [name, overload, rule] : calls)
    calls_.emplace_back(
        c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), rule);
}

void SegmentedCalls::restart() {
  next_ = 0;
  difference_.clear();
}

std::string SegmentedCalls::find_difference() const {
  if (!difference_.empty() || next_ == calls_.size()) return difference_;
  return calls_[next_].first.schema().name();
}

void SegmentedCalls::call(const c10::OperatorHandle& op, Stack* stack) {
  const bool is_expected = next_ < calls_.size() && calls_[next_].first == op;
  if (!is_expected && difference_.empty()) difference_ = op.schema().name();
  if (!difference_.empty()) {
    op.callBoxed(stack);
    return;
  }
  const std::optional<SegmentRule>& rule = calls_[next_++].second;
  if (!rule) {
    op.callBoxed(stack);
  } else if (can_be_cut(*stack, op.schema().arguments().size(), *rule, segments_)) {
    call_segments(op, *rule, stack);
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
        if (sliced == position) return take_rows(tensor, dimension, segment, segments_);
      return tensor;
    });
    op.callBoxed(&part);
    for (size_t i = 0; i < returns; ++i) {
      at::Tensor result = part[i].toTensor();
      part[i] = c10::IValue();
      is_defined[i] = result.defined();
      if (!is_defined[i]) continue;
      if (rule.results[i] < 0)
        sums[i].add(std::move(result));
      else
        rows[i].push_back(std::move(result));
    }
  }
  for (size_t i = 0; i < returns; ++i) {
    at::Tensor result;
    if (is_defined[i])
      result = rule.results[i] < 0 ? sums[i].total() : at::cat(rows[i], rule.results[i]);
    stack->emplace_back(std::move(result));
  }
}

}  // namespace lockstep
