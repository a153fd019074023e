#include "segmented_loss.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/nll_loss_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_set>

#include "torch_errors.h"

namespace lockstep {
namespace loss {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Slices = std::vector<std::pair<size_t, int64_t>>;  // tensors, and the dimension of their rows

// A loss and the operator of its gradient, which gets the gradient of the loss, the arguments of
// the loss, and what else the loss has returned. Others have none, and `spread` computes it.
struct Operators {
  c10::OperatorHandle forward;
  std::optional<c10::OperatorHandle> backward;
};

constexpr const char* kLogits = "aten::binary_cross_entropy_with_logits";
constexpr const char* kSum = "aten::sum";

static const std::vector<Operators>& list_operators() {
  static const std::vector<Operators> known = [] {
    constexpr std::array<std::pair<const char*, const char*>, 10> kNames = {{
        {"aten::nll_loss_forward", "aten::nll_loss_backward"},
        {"aten::nll_loss2d_forward", "aten::nll_loss2d_backward"},
        {"aten::mse_loss", "aten::mse_loss_backward"},
        {"aten::smooth_l1_loss", "aten::smooth_l1_loss_backward"},
        {"aten::huber_loss", "aten::huber_loss_backward"},
        {"aten::soft_margin_loss", "aten::soft_margin_loss_backward"},
        {"aten::binary_cross_entropy", "aten::binary_cross_entropy_backward"},
        {kLogits, ""},
        {"aten::mean", ""},
        {kSum, ""},
    }};
    std::vector<Operators> found;
    const auto find = [](const char* name) {
      return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    };
    for (const auto& [forward, backward] : kNames)
      found.push_back({find(forward), *backward ? std::optional(find(backward)) : std::nullopt});
    return found;
  }();
  return known;
}

static const Operators* find_operators(const c10::OperatorHandle& op) {
  for (const Operators& one : list_operators())
    if (one.forward == op) return &one;
  return nullptr;
}

// Returns whether a node of the graph multiplies, divides or selects the elements of a gradient, or
// hands them on to one that does.
static bool takes_elements(const torch::autograd::Node& node) {
  static const std::unordered_set<std::string> kExact = {
      "AbsBackward0",
      "BinaryCrossEntropyBackward0",
      "BinaryCrossEntropyWithLogitsBackward0",
      "ClampBackward1",
      "ClampMinBackward0",
      "DivBackward0",
      "DivBackward1",
      "ExpBackward0",
      "HuberLossBackward0",
      "LogBackward0",
      "LogSoftmaxBackward0",
      "MaskedFillBackward0",
      "MseLossBackward0",
      "MulBackward0",
      "MulBackward1",
      "NllLoss2DBackward0",
      "NllLossBackward0",
      "PowBackward0",
      "ReluBackward0",
      "SqrtBackward0",
      "WhereBackward0",
  };
  static const std::unordered_set<std::string> kViews = {
      "MeanBackward1",      "NegBackward0",       "PermuteBackward0", "ReshapeAliasBackward0",
      "SqueezeBackward0",   "SqueezeBackward1",   "SumBackward1",     "TBackward0",
      "TransposeBackward0", "UnsqueezeBackward0", "ViewBackward0"};
  const std::string name = node.name();
  if (kExact.contains(name)) return true;
  // Those that broadcast a term add up its gradient.
  const bool is_sum = name == "AddBackward0" || name == "SubBackward0";
  if (!is_sum && !kViews.contains(name)) return false;
  return std::all_of(node.next_edges().begin(), node.next_edges().end(),
                     [&](const torch::autograd::Edge& edge) {
                       if (!edge.is_valid()) return true;
                       const auto& next = *edge.function;
                       const bool has_shape =
                           !is_sum || next.input_metadata(edge.input_nr).shape_as_dim_vector() ==
                                          node.input_metadata(0).shape_as_dim_vector();
                       return has_shape && takes_elements(next);
                     });
}

// Returns whether a loss is a number, and not one for each sample.
static bool is_reduced(const c10::OperatorHandle& op, const c10::IValue* given) {
  const auto reduction = op.schema().argumentIndexWithName("reduction");
  return !reduction || given[*reduction].toInt() != at::Reduction::None;
}

// Returns the dimension of the rows of a tensor; 0 if there is one micro-batch only.
static int64_t find_dimension(const Slices& slices, size_t position) {
  for (const auto& [sliced, dimension] : slices)
    if (sliced == position) return dimension;
  return 0;
}

// Calls an operator for each micro-batch; returns the tensors that it returns for each.
static std::vector<std::vector<at::Tensor>> call_each(const c10::OperatorHandle& op,
                                                      const Stack& given, int64_t segments,
                                                      const Slices& slices) {
  std::vector<std::vector<at::Tensor>> results(op.schema().returns().size());
  for (int64_t segment = 0; segment < segments; ++segment) {
    Stack part = given;
    if (segments > 1)
      change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
        for (const auto& [sliced, dimension] : slices) {
          if (sliced != position) continue;
          // Copied for its alignment, it would have another layout than in a separate pass.
          CHECK_ARGUMENT(tensor.is_non_overlapping_and_dense(), "a loss gets a part of a tensor");
          return take_rows(tensor, dimension, segment, segments);
        }
        return tensor;
      });
    op.callBoxed(&part);
    for (size_t i = 0; i < results.size(); ++i) results[i].push_back(part[i].toTensor());
  }
  return results;
}

// Returns the numbers of the micro-batches, each at its rows, to be broadcast to the samples.
static at::Tensor repeat_rows(const at::Tensor& numbers, const at::Tensor& samples,
                              int64_t dimension) {
  const int64_t segments = numbers.numel();
  std::vector<int64_t> one_per_row(static_cast<size_t>(samples.dim()), 1);
  if (segments == 1) return numbers.reshape(one_per_row);
  const int64_t rows = samples.size(dimension);
  one_per_row[static_cast<size_t>(dimension)] = rows;
  return numbers.unsqueeze(1).expand({segments, rows / segments}).reshape(one_per_row);
}

// The gradient of samples, given that of the mean or the sum of each micro-batch, which a pass does
// not see. For logits this is torch's formula without weights.
//
// Its layout is torch's, since what comes next may add in its order: that of a sum is one number
// that is expanded, and that of a mean has memory in the order of the dimensions.
//
// `dimension`: that of the rows of the samples.
static at::Tensor spread(const c10::OperatorHandle& op, const at::Tensor& gradient,
                         const variable_list& saved, const c10::IValue* values, int64_t dimension) {
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::TESTING_ONLY_GenericMode);
  CHECK_ARGUMENT(!at::GradMode::is_enabled(), "a second derivative of a mean has no rows");
  const at::Tensor& samples = saved[0];
  const int64_t segments = gradient.numel(), each = samples.numel() / segments;
  const bool is_logits = op.schema().name() == kLogits;
  const bool is_mean =
      is_logits ? values[4].toInt() == at::Reduction::Mean : op.schema().name() != kSum;
  at::Tensor rows = is_mean && !is_logits ? gradient / each : gradient;
  rows = repeat_rows(rows.to(samples.scalar_type()), samples, dimension);
  if (!is_logits) {
    rows = rows.expand(samples.sizes());
    return is_mean ? rows.contiguous() : rows;
  }
  rows = (samples.sigmoid() - saved[1]).mul_(rows);
  return is_mean ? rows.div_(each) : rows;
}

class SegmentedLoss : public torch::autograd::Function<SegmentedLoss> {
 public:
  // `given`: the arguments of the loss, the first of which is `samples`.
  static variable_list forward(AutogradContext* context, const at::Tensor& samples,
                               const Operators& operators, const Stack& given, int64_t segments,
                               const Slices& slices) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list results;
    for (std::vector<at::Tensor>& each : call_each(operators.forward, given, segments, slices)) {
      for (at::Tensor& one : each) one = one.reshape({1});
      results.push_back(at::cat(each));
    }
    // An undefined tensor is one of the other values.
    variable_list saved;
    std::vector<c10::IValue> values;
    for (const c10::IValue& value : given) {
      saved.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
      values.push_back(value.isTensor() ? c10::IValue() : value);
    }
    if (results.size() > 1) {  // the weight of all samples, by which the mean is divided
      saved.push_back(results.back());
      context->mark_non_differentiable({results.back()});
    }
    context->save_for_backward(saved);
    context->saved_data["values"] = c10::ivalue::Tuple::create(std::move(values));
    context->saved_data["dimension"] = find_dimension(slices, 0);
    context->saved_data["operators"] = static_cast<int64_t>(&operators - list_operators().data());
    context->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list results(5);  // one for each argument of `forward`
    if (!gradients[0].defined()) return results;
    const auto number = static_cast<size_t>(context->saved_data["operators"].toInt());
    const auto& values = context->saved_data["values"].toTupleRef().elements();
    const variable_list saved = context->get_saved_variables();
    const Operators& operators = list_operators()[number];
    if (!operators.backward) {
      results[0] = spread(operators.forward, gradients[0], saved, values.begin(),
                          context->saved_data["dimension"].toInt());
      return results;
    }
    Stack stack = {gradients[0]};
    for (size_t i = 0; i < saved.size(); ++i)
      stack.push_back(saved[i].defined() ? c10::IValue(saved[i]) : values[i]);
    operators.backward->callBoxed(&stack);  // which a pass sees
    results[0] = stack.back().toTensor();
    return results;
  }
};

// The tensors that grow with the number of micro-batches.
static Slices find_slices(const c10::OperatorHandle& op, const Stack& stack,
                          const std::vector<std::vector<int64_t>>& alone) {
  Slices slices;
  const std::vector<at::Tensor> tensors = list_tensors(stack, op.schema().arguments().size());
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].defined() && tensors[i].sizes() != at::IntArrayRef(alone[i]))
      if (const auto grown = find_grown(alone[i], tensors[i].sizes()))
        slices.emplace_back(i, *grown);
  return slices;
}

// Returns whether an operator computes the gradient of a mean over samples or of their sum.
static bool is_gradient(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& known = list_operators();
  const bool is_backward = std::any_of(known.begin(), known.end(),
                                       [&](const Operators& one) { return one.backward == op; });
  return is_backward &&
         is_reduced(op, stack.data() + stack.size() - op.schema().arguments().size());
}

// Calls the operator of a gradient for the rows of each micro-batch.
static void call_gradient(const c10::OperatorHandle& op, Stack* stack, int64_t segments,
                          const Slices& slices) {
  const Stack given(stack->end() - std::ssize(op.schema().arguments()), stack->end());
  torch::jit::drop(*stack, given.size());
  const int64_t dimension = find_dimension(slices, 1);  // of the samples, as in their gradient
  stack->emplace_back(join_rows(call_each(op, given, segments, slices).front(), dimension));
}

}  // namespace loss

bool takes_elements(const at::Tensor& samples) {
  return samples.grad_fn() && loss::takes_elements(*samples.grad_fn());
}

bool is_loss(const c10::OperatorHandle& op, const Stack& stack) {
  if (!at::GradMode::is_enabled() || !loss::find_operators(op)) return false;
  const size_t count = op.schema().arguments().size();
  const c10::IValue* const given = stack.data() + stack.size() - count;
  if (!loss::is_reduced(op, given) || given[0].toTensor().dim() == 0) return false;
  const std::vector<at::Tensor> tensors = list_tensors(stack, count);
  // Sigmoids of other types depend on the position of an element.
  const bool is_logits = op.schema().name() == loss::kLogits;
  if (is_logits && (tensors.size() > 2 || tensors[0].scalar_type() != at::kFloat ||
                    tensors[1].scalar_type() != at::kFloat))
    return false;
  const bool has_operator = is_logits || loss::find_operators(op)->backward;
  if (!has_operator && tensors[0].requires_grad() && !takes_elements(tensors[0])) return false;
  return std::none_of(tensors.begin() + 1, tensors.end(), [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  });
}

bool keeps_losses(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors,
                  TensorMap<bool>& losses) {
  static const std::unordered_set<std::string> kCopies = {
      "aten::_to_copy",   "aten::alias",     "aten::clone", "aten::detach",
      "aten::empty_like", "aten::ones_like", "aten::to",    "aten::zeros_like"};
  if (kCopies.contains(op.schema().name())) return true;
  if (!op.hasTag(at::Tag::pointwise)) return false;
  const auto is_loss = [&](const at::Tensor& tensor) {
    return tensor.defined() && losses.find(tensor) != nullptr;
  };
  auto type = at::ScalarType::Undefined;  // of the losses, which counts for more than a number's
  for (const at::Tensor& tensor : tensors)
    if (is_loss(tensor))
      type = type == at::ScalarType::Undefined ? tensor.scalar_type()
                                               : c10::promoteTypes(type, tensor.scalar_type());
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    if (is_loss(tensor)) return true;
    if (!tensor.defined() || tensor.dim() > 0) return false;
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
           c10::promoteTypes(type, tensor.scalar_type()) == type;
  });
}

void call_loss(const c10::OperatorHandle& op, Stack* stack, int64_t segments,
               const std::vector<std::pair<size_t, int64_t>>& slices) {
  const Stack given(stack->end() - std::ssize(op.schema().arguments()), stack->end());
  torch::jit::drop(*stack, given.size());
  for (const at::Tensor& result : loss::SegmentedLoss::apply(
           given[0].toTensor(), *loss::find_operators(op), given, segments, slices))
    stack->emplace_back(result);
}

bool try_loss(const c10::OperatorHandle& op, Stack* stack,
              const std::vector<std::vector<int64_t>>* alone, bool is_forward) {
  if (!is_forward && !(alone && loss::is_gradient(op, *stack))) return false;
  loss::Slices slices;
  if (alone) slices = loss::find_slices(op, *stack, *alone);
  int64_t segments = 1;
  if (!slices.empty()) {
    const auto [position, dimension] = slices.front();
    const at::Tensor rows = list_tensors(*stack, op.schema().arguments().size())[position];
    segments = rows.size(dimension) / (*alone)[position][static_cast<size_t>(dimension)];
  }
  if (is_forward)
    call_loss(op, stack, segments, slices);
  else
    loss::call_gradient(op, stack, segments, slices);
  return true;
}

std::vector<at::Tensor> try_nll_gradient(const c10::IValue* arguments, int64_t segments) {
  const at::Tensor& samples = arguments[1].toTensor();
  const at::Tensor& weight = arguments[6].toTensor();  // of all samples of each micro-batch
  at::Tensor gradient = arguments[0].toTensor();
  const int64_t reduction = arguments[4].toInt();
  if (samples.dim() != 2 || gradient.size(0) != segments || weight.size(0) != segments) return {};
  if (reduction == at::Reduction::Mean) gradient = gradient / weight;
  const int64_t each = samples.size(0) / segments;
  gradient = gradient.unsqueeze(1).expand({segments, each}).reshape(-1);
  const at::Tensor of_classes = arguments[3].isTensor() ? arguments[3].toTensor() : at::Tensor();
  return {at::nll_loss_backward(gradient, samples, arguments[2].toTensor(), of_classes,
                                at::Reduction::None, arguments[5].toInt(), weight[0])};
}

}  // namespace lockstep
