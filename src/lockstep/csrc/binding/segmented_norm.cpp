#include "segmented_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace lockstep {
namespace norm {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The positions among the arguments of native_batch_norm.
enum Argument { kInput, kWeight, kBias, kMean, kVariance, kTraining, kMomentum, kEpsilon, kCount };

// The running statistics of a call: those of the step, and those of each micro-batch.
struct Running {
  at::Tensor mean, variance;
  std::vector<at::Tensor> means, variances;
};

static at::Tensor to_tensor(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

static std::optional<at::Tensor> to_optional(const c10::IValue& value) {
  if (!to_tensor(value).defined()) return std::nullopt;
  return value.toTensor();
}

static const c10::OperatorHandle& find_backward() {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_batch_norm_backward", "");
  return op;
}

// Calls the backward operator for the rows of each micro-batch, and adds the gradients of weight
// and bias in any order.
static void call_backward(Stack* stack, int64_t segments) {
  const c10::OperatorHandle& op = find_backward();
  const Stack given(stack->end() - std::ssize(op.schema().arguments()), stack->end());
  torch::jit::drop(*stack, given.size());
  std::vector<at::Tensor> rows;
  at::Tensor weight, bias;
  for (int64_t segment = 0; segment < segments; ++segment) {
    Stack part = given;
    // The gradient, the input, and the statistics of the micro-batch.
    for (const size_t argument : {0, 1, 5, 6})
      part[argument] = take_rows(given[argument].toTensor(), 0, segment, segments);
    op.callBoxed(&part);
    rows.push_back(to_tensor(part[0]));
    weight = weight.defined() ? weight + part[1].toTensor() : to_tensor(part[1]);
    bias = bias.defined() ? bias + part[2].toTensor() : to_tensor(part[2]);
  }
  stack->emplace_back(rows.front().defined() ? at::cat(rows) : at::Tensor());
  stack->emplace_back(weight);
  stack->emplace_back(bias);
}

// The results of forward for all micro-batches.
struct Normalized {
  at::Tensor rows, means, inverses;  // 1 / deviation
};

// The layout of the results that torch's `out=` form writes as its usual form does, which is that
// of dense rows; or none. With other inputs it reads memory that nobody has written, and dense rows
// that are both contiguous and channels_last may get other strides.
static std::optional<at::MemoryFormat> find_layout(const at::Tensor& input,
                                                   const std::optional<at::Tensor>& weight,
                                                   const std::optional<at::Tensor>& bias) {
  for (const std::optional<at::Tensor>& one : {weight, bias})
    if (one && (!one->is_contiguous() || one->scalar_type() != input.scalar_type())) return {};
  const at::MemoryFormat format = input.suggest_memory_format();
  const bool is_known =
      format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::ChannelsLast;
  if (!input.device().is_cpu() || input.layout() != at::kStrided || !is_known) return {};
  const bool is_ambiguous = format != at::MemoryFormat::Contiguous && input.is_contiguous();
  if (is_ambiguous || !input.is_contiguous(format)) return {};
  return format;
}

// The part of a tensor that belongs to a micro-batch, to be written.
static at::Tensor find_place(const at::Tensor& tensor, int64_t segment, int64_t segments) {
  const int64_t rows = tensor.size(0) / segments;
  return tensor.narrow(0, segment * rows, rows);
}

// Normalizes the rows of each micro-batch.
static Normalized normalize(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Running& running,
                            double momentum, double epsilon) {
  const int64_t segments = std::ssize(running.means);
  const auto layout = find_layout(input, weight, bias);
  Normalized all;
  if (layout) {
    all.rows = at::empty(input.sizes(), input.options().memory_format(*layout));
    all.means = at::empty({segments * input.size(1)}, input.options());
    all.inverses = at::empty({segments * input.size(1)}, input.options());
  }
  std::vector<at::Tensor> rows, means, inverses;
  for (int64_t i = 0; i < segments; ++i) {
    const at::Tensor &mean = running.means[static_cast<size_t>(i)],
                     &variance = running.variances[static_cast<size_t>(i)];
    const at::Tensor own = take_rows(input, 0, i, segments);
    if (layout) {
      at::Tensor place = find_place(all.rows, i, segments);
      at::Tensor place_of_mean = find_place(all.means, i, segments);
      at::Tensor place_of_inverse = find_place(all.inverses, i, segments);
      at::native_batch_norm_out(place, place_of_mean, place_of_inverse, own, weight, bias, mean,
                                variance, /*training=*/true, momentum, epsilon);
      continue;
    }
    auto [part, part_mean, part_inverse] = at::native_batch_norm(
        own, weight, bias, mean, variance, /*training=*/true, momentum, epsilon);
    rows.push_back(std::move(part));
    means.push_back(std::move(part_mean));
    inverses.push_back(std::move(part_inverse));
  }
  return layout ? all : Normalized{at::cat(rows), at::cat(means), at::cat(inverses)};
}

class SegmentedNorm : public torch::autograd::Function<SegmentedNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, const Running& running,
                               double momentum, double epsilon) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Normalized all = normalize(input, weight, bias, running, momentum, epsilon);
    context->save_for_backward({input, weight.value_or(at::Tensor()), running.mean,
                                running.variance, all.means, all.inverses});
    context->saved_data["segments"] = std::ssize(running.means);
    context->saved_data["epsilon"] = epsilon;
    context->saved_data["has_bias"] = bias.has_value();
    context->mark_non_differentiable({all.means, all.inverses});
    context->set_materialize_grads(false);
    return {all.rows, all.means, all.inverses};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(6);  // one for each argument of `forward`
    if (!gradients[0].defined()) return results;
    Stack stack = {gradients[0]};
    const variable_list saved = context->get_saved_variables();
    stack.insert(stack.end(), saved.begin(), saved.end());
    const bool has_weight = saved[1].defined();
    const bool has_bias = context->saved_data["has_bias"].toBool();
    stack.emplace_back(/*train=*/true);
    stack.emplace_back(context->saved_data["epsilon"]);
    stack.emplace_back(c10::List<bool>{context->needs_input_grad(0),
                                       has_weight && context->needs_input_grad(1),
                                       has_bias && context->needs_input_grad(has_weight ? 2 : 1)});
    if (at::GradMode::is_enabled())  // a second derivative
      call_backward(&stack, context->saved_data["segments"].toInt());
    else
      find_backward().callBoxed(&stack);  // which a pass sees
    for (size_t i = 0; i < stack.size(); ++i) results[i] = to_tensor(stack[i]);
    return results;
  }
};

}  // namespace norm

std::vector<at::Tensor> RunningStatistics::take(const at::Tensor& running, int64_t segments) {
  std::vector<at::Tensor> own(static_cast<size_t>(segments));
  if (!running.defined()) return own;
  if (const std::vector<at::Tensor>* const known = parts.find(running)) return *known;
  for (at::Tensor& one : own) one = running.detach().clone();
  parts.set(running, own);
  storages.insert(running.storage().unsafeGetStorageImpl());
  ++count;
  return own;
}

bool RunningStatistics::have(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.has_storage() &&
         storages.contains(tensor.storage().unsafeGetStorageImpl());
}

void call_batch_norm(Stack* stack, int64_t segments, RunningStatistics& statistics) {
  const Stack given(stack->end() - norm::kCount, stack->end());
  torch::jit::drop(*stack, norm::kCount);
  norm::Running running;
  running.mean = norm::to_tensor(given[norm::kMean]);
  running.variance = norm::to_tensor(given[norm::kVariance]);
  running.means = statistics.take(running.mean, segments);
  running.variances = statistics.take(running.variance, segments);
  for (const at::Tensor& result : norm::SegmentedNorm::apply(
           given[norm::kInput].toTensor(), norm::to_optional(given[norm::kWeight]),
           norm::to_optional(given[norm::kBias]), running, given[norm::kMomentum].toDouble(),
           given[norm::kEpsilon].toDouble()))
    stack->emplace_back(result);
}

bool try_batch_norm(const c10::OperatorHandle& op, Stack* stack,
                    const std::vector<std::vector<int64_t>>& alone, RunningStatistics& statistics) {
  const std::string& name = op.schema().name();
  const bool is_forward = name == "aten::native_batch_norm";
  const bool is_backward = name == "aten::native_batch_norm_backward";
  if ((!is_forward && !is_backward) || !op.schema().overload_name().empty()) return false;
  const c10::IValue* const given = stack->data() + stack->size() - op.schema().arguments().size();
  const at::Tensor& rows = given[0].toTensor();
  const at::Tensor weight = norm::to_tensor(given[is_forward ? 1 : 2]);
  const bool is_training = given[is_forward ? 5 : 7].toBool();
  const bool is_plain = rows.scalar_type() == at::kFloat || rows.scalar_type() == at::kDouble;
  if (!is_training || !is_plain || find_grown(alone.front(), rows.sizes()) != 0) return false;
  if (weight.defined() && weight.scalar_type() != rows.scalar_type()) return false;
  const int64_t segments = rows.size(0) / alone.front().front();
  if (is_forward)
    call_batch_norm(stack, segments, statistics);
  else
    norm::call_backward(stack, segments);
  return true;
}

}  // namespace lockstep
