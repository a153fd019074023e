#include "segmented_calls.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <iterator>

#include "microbatch.h"
#include "portable_kernels.h"
#include "segmented_loss.h"
#include "torch_errors.h"

namespace lockstep {
namespace {

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

// The rows of all micro-batches.
at::Tensor join_turns(const std::vector<at::Tensor>& rows, int64_t dimension, int64_t turns) {
  if (turns == 1) return join_rows(rows, dimension);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& one : rows)
    parts.push_back(one.unflatten(dimension, {turns, one.size(dimension) / turns}));
  return at::stack(parts, dimension + 1).flatten(dimension, dimension + 2);
}

// Returns whether an operator writes its first argument, and returns it.
bool is_in_place(const c10::OperatorHandle& op) {
  const c10::AliasInfo* alias = op.schema().arguments().front().alias_info();
  return alias && alias->isWrite();
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

// Adds the entries of the first dimension along the tree, as TreeSum does, a level at a time.
at::Tensor add_entries(at::Tensor entries) {
  while (entries.size(0) > 1) {
    const int64_t pairs = entries.size(0) / 2;
    at::Tensor sums = entries.slice(0, 0, 2 * pairs, 2) + entries.slice(0, 1, 2 * pairs, 2);
    entries = entries.size(0) % 2 ? at::cat({sums, entries.slice(0, 2 * pairs)}) : sums;
  }
  return entries.select(0, 0);
}

// The rows of each micro-batch one after the other, where they alternate.
at::Tensor sort_rows(const at::Tensor& tensor, int64_t dimension, int64_t segments, int64_t turns) {
  if (turns == 1) return tensor;
  const int64_t each = tensor.size(dimension) / segments / turns;
  const at::Tensor rows = tensor.movedim(dimension, 0).unflatten(0, {turns, segments, each});
  return rows.transpose(0, 1).flatten(0, 2).movedim(0, dimension);
}

// Computes the products of all micro-batches, whose terms are the rows, and their sum.
std::vector<at::Tensor> try_product(const c10::IValue* arguments, int64_t segments,
                                    const SegmentRule& rule) {
  at::Tensor sum =
      try_multiply_segments(sort_rows(arguments[0].toTensor(), 1, segments, rule.turns),
                            sort_rows(arguments[1].toTensor(), 0, segments, rule.turns), segments);
  return sum.defined() ? std::vector{std::move(sum)} : std::vector<at::Tensor>();
}

// The sum along the tree of the sums of each micro-batch over some dimensions, the first of which
// has its rows; undefined if torch may add a micro-batch on its own in another order.
at::Tensor add_rows(const at::Tensor& rows, int64_t dimension, int64_t segments, int64_t turns,
                    std::vector<int64_t> reduced, bool keeps_dimensions) {
  if (!rows.is_contiguous()) return {};
  const int64_t each = rows.size(dimension) / segments;
  // A copy begins with all of the first micro-batch.
  const at::Tensor parts = rows.unflatten(dimension, {turns, segments, each / turns})
                               .movedim(dimension + 1, 0)
                               .contiguous()
                               .flatten(dimension + 1, dimension + 2);
  const auto address = reinterpret_cast<uintptr_t>(parts.const_data_ptr());
  const int64_t bytes = parts.stride(0) * parts.element_size();
  if (address % kAlignment || bytes % int64_t{kAlignment}) return {};
  for (int64_t& one : reduced) ++one;
  return add_entries(parts.sum(reduced, keeps_dimensions));
}

// Computes the sums of the rows of all micro-batches, and their sum.
std::vector<at::Tensor> try_sum(const c10::IValue* arguments, int64_t segments,
                                const SegmentRule& rule) {
  const at::Tensor& rows = arguments[0].toTensor();
  if (!arguments[1].isIntList() || !arguments[3].isNone()) return {};
  std::vector<int64_t> reduced = arguments[1].toIntVector();
  for (int64_t& one : reduced) one += one < 0 ? rows.dim() : 0;
  at::Tensor sum = add_rows(rows, rule.slices[0].second, segments, rule.turns, std::move(reduced),
                            arguments[2].toBool());
  return sum.defined() ? std::vector{std::move(sum)} : std::vector<at::Tensor>();
}

// Computes the input gradients of all micro-batches together, and the others along the tree.
std::vector<at::Tensor> try_convolution(const c10::IValue* arguments, int64_t segments,
                                        const SegmentRule&) {
  std::vector<at::Tensor> results = try_convolution_segments(arguments, segments);
  if (results.empty() || !arguments[10].toBoolList()[2]) return results;
  const at::Tensor gradient = arguments[0].toTensor().contiguous();
  results[2] = add_rows(gradient, 0, segments, 1, {0, 2, 3}, false);
  if (results[2].defined()) return results;
  TreeSum of_bias;
  for (int64_t segment = 0; segment < segments; ++segment)
    of_bias.add(take_rows(gradient, 0, segment, segments).sum({0, 2, 3}));
  results[2] = of_bias.total();
  return results;
}

template <std::vector<at::Tensor> (*compute)(const c10::IValue*, int64_t)>
std::vector<at::Tensor> without_rule(const c10::IValue* arguments, int64_t segments,
                                     const SegmentRule&) {
  return compute(arguments, segments);
}

// Returns what computes the results of all micro-batches, and their sum, in a few calls.
SegmentedCalls::Total find_total(const std::string& name, const std::string& overload,
                                 const std::optional<SegmentRule>& rule) {
  using Slices = std::vector<std::pair<size_t, int64_t>>;
  if (!rule || rule->draws || rule->keeps_parts) return nullptr;
  if (name == "aten::mm" && overload.empty() && rule->slices == Slices{{0, 1}, {1, 0}})
    return try_product;
  if (name == "aten::sum" && overload == "dim_IntList" && rule->results.front() < 0) return try_sum;
  if (rule->turns > 1) return nullptr;
  if (name == "aten::convolution_backward" && overload.empty() &&
      rule->slices == Slices{{0, 0}, {1, 0}})
    return try_convolution;
  if (name == "aten::mkldnn_rnn_layer_backward" && overload.empty() &&
      rule->results == std::vector<int64_t>{1, -1, -1, -1, -1, 0, 0})
    return without_rule<try_lstm_segments>;
  const bool is_of_samples =
      rule->slices.size() == 4 && std::all_of(rule->slices.begin(), rule->slices.end(),
                                              [](const auto& one) { return one.second == 0; });
  if (name == "aten::nll_loss_backward" && overload.empty() && is_of_samples)
    return without_rule<try_nll_gradient>;
  if (name == "aten::native_layer_norm_backward" && overload.empty() && is_of_samples)
    return without_rule<try_layer_norm_segments>;
  return nullptr;
}

}  // namespace

SegmentedCalls::SegmentedCalls(const std::vector<Expected>& calls, int64_t segments,
                               bool joins_losses)
    : PassCalls(joins_losses), segments_(segments) {
  CHECK_ARGUMENT(segments > 0, "there are no segments");
  for (const auto& [name, overload, rule, arguments] : calls)
    calls_.push_back(
        {c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), rule,
         *arguments.get_pointer<CallArguments>(), find_total(name, overload, rule),
         rule && name == "aten::native_batch_norm" && overload.empty()});
  const bool has_draws = std::any_of(
      calls_.begin(), calls_.end(), [](const Call& call) { return call.rule && call.rule->draws; });
  for (int64_t i = 0; has_draws && i < segments; ++i)
    generators_.push_back(at::detail::createCPUGenerator());
}

void SegmentedCalls::seed(const std::vector<std::string>& prefixes, int64_t scope, int64_t call) {
  if (generators_.empty()) return;
  CHECK_ARGUMENT(prefixes.size() == generators_.size(), "there is not one key per segment");
  seeds_.clear();
  for (const std::string& prefix : prefixes) seeds_.push_back(find_seed(prefix, scope, call));
}

void SegmentedCalls::restart() {
  next_ = 0;
  difference_.clear();
  parts_.clear();
  statistics_ = {};
  reads_statistics_ = false;
}

std::optional<std::vector<at::Tensor>> SegmentedCalls::find_statistics(const at::Tensor& running) {
  if (const std::vector<at::Tensor>* const known = statistics_.parts.find(running)) return *known;
  return std::nullopt;
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
  const bool is_norm = next_ < calls_.size() && calls_[next_].op == op && calls_[next_].is_norm;
  reads_statistics_ = reads_statistics_ || (!is_norm && gets_statistics(op, *stack));
  const bool is_expected = !reads_statistics_ && next_ < calls_.size() && calls_[next_].op == op &&
                           !has_subclass(*stack, op.schema().arguments().size()) &&
                           has_arguments(op, *stack, calls_[next_].arguments);
  if (!is_expected && difference_.empty()) difference_ = op.schema().name();
  if (!difference_.empty()) {
    op.callBoxed(stack);
    return;
  }
  const Call& call = calls_[next_++];
  const std::optional<SegmentRule>& rule = call.rule;
  if (!rule) {
    op.callBoxed(stack);
  } else if (joins_losses() && is_loss(op, *stack)) {
    call_loss(op, stack, segments_, rule->slices);
  } else if (call.is_norm) {
    call_batch_norm(stack, segments_, statistics_);
  } else if (rule->slices.empty()) {
    call_parts(op, stack);
  } else if (can_be_cut(*stack, op.schema().arguments().size(), *rule, segments_)) {
    if (rule->draws)
      draw(op, *rule, stack);
    else if (!try_total(call, stack))
      call_segments(op, *rule, stack);
  } else {
    difference_ = op.schema().name();
    op.callBoxed(stack);
  }
}

bool SegmentedCalls::gets_statistics(const c10::OperatorHandle& op, const Stack& stack) const {
  if (statistics_.count == 0) return false;
  const std::vector<at::Tensor> tensors = list_tensors(stack, op.schema().arguments().size());
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return statistics_.have(tensor); });
}

// Computes the results of all micro-batches and their sum in a few calls, and returns true; false,
// and changes nothing, if this is not possible.
bool SegmentedCalls::try_total(const Call& call, Stack* stack) const {
  if (!call.total || at::GradMode::is_enabled()) return false;
  const size_t first = stack->size() - call.op.schema().arguments().size();
  // As in the operator's own kernel. A view that autograd knows would keep its base.
  const c10::impl::ExcludeDispatchKeyGuard below(
      c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  std::vector<at::Tensor> results = call.total(&(*stack)[first], segments_, *call.rule);
  if (results.empty()) return false;
  torch::jit::drop(*stack, stack->size() - first);
  for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  return true;
}

void SegmentedCalls::call_segments(const c10::OperatorHandle& op, const SegmentRule& rule,
                                   Stack* stack) {
  const auto arguments = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const size_t returns = op.schema().returns().size();
  const Stack given(stack->end() - arguments, stack->end());
  torch::jit::drop(*stack, static_cast<size_t>(arguments));
  // Where nothing is differentiated, autograd's kernels are not passed for every micro-batch.
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below;
  if (!at::GradMode::is_enabled())
    below.emplace(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
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
      result = join_turns(rows[i], rule.results[i], rule.turns);
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
  // Most scopes draw nothing, and a generator takes longer to seed than a key to compute.
  for (size_t i = 0; i < seeds_.size(); ++i) generators_[i].set_current_seed(seeds_[i]);
  seeds_.clear();
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
