#include "free_rows.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <optional>

namespace lockstep {
namespace {

constexpr uint64_t kSeed = 1;

// The dimension of the rows of each tensor, and the number of micro-batches.
struct Rows {
  std::vector<std::optional<int64_t>> dimensions;
  int64_t segments = 0;  // 0: there are no rows, or not one part per micro-batch
};

Rows find_rows(const std::vector<std::vector<int64_t>>& one, const std::vector<at::Tensor>& all) {
  Rows rows;
  if (one.size() != all.size()) return {};
  for (size_t i = 0; i < one.size(); ++i) {
    std::optional<int64_t>& dimension = rows.dimensions.emplace_back();
    if (!all[i].defined() || all[i].sizes() == at::IntArrayRef(one[i])) continue;
    dimension = find_grown(one[i], all[i].sizes());
    if (!dimension) return {};
    const int64_t segments = all[i].size(*dimension) / one[i][static_cast<size_t>(*dimension)];
    if (rows.segments && rows.segments != segments) return {};
    rows.segments = segments;
  }
  return rows;
}

// Other values for an argument, in the same layout if it can be written.
at::Tensor make_other(const at::Tensor& tensor, bool is_integral, at::Generator& generator) {
  if (!tensor.defined() || tensor.is_complex() || tensor.layout() != at::kStrided ||
      !tensor.is_cpu() || tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
      (!tensor.is_floating_point() && !is_integral))
    return tensor;
  at::Tensor other = tensor.is_non_overlapping_and_dense()
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options())
                         : at::empty(tensor.sizes(), tensor.options());
  if (tensor.is_floating_point()) return other.normal_(0, 1, generator);
  return other.random_(0, 2, generator);
}

// Returns the results of an operator, one by one; nothing if it fails. It gets copies of tensors if
// it writes any.
std::optional<std::vector<at::Tensor>> try_call(const c10::OperatorHandle& op, Stack stack) {
  if (op.schema().is_mutable())
    change_tensors(stack, [](const at::Tensor& tensor, size_t) {
      const bool is_plain = tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return is_plain ? tensor.detach().clone() : tensor;
    });
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {  // for example a number that it does not take
    return std::nullopt;
  }
  return list_tensors(stack, op.schema().returns().size());
}

// NaN has several bits, and random numbers are not in the domain of every function.
at::Tensor without_nan(const at::Tensor& tensor) {
  return tensor.is_floating_point() ? tensor.masked_fill(tensor.isnan(), 0.5) : tensor;
}

// Returns by how many turns a result for all micro-batches may have the rows of that for one; {0}
// if this cannot be said.
std::vector<int64_t> compare_result(const at::Tensor& all, const at::Tensor& one, int64_t segment,
                                    int64_t segments) {
  if (!all.defined() || !one.defined() || all.layout() != at::kStrided || !all.is_cpu() ||
      one.numel() == 0)
    return {0};
  const std::optional<int64_t> dimension = find_grown(one.sizes(), all.sizes());
  if (!dimension || all.size(*dimension) != one.size(*dimension) * segments) return {0};
  return find_turns(without_nan(all), *dimension, segment, segments, hash_bits(without_nan(one)));
}

// Of the turns that results may have, those of an argument, or else the only ones; 0 if there are
// several.
int64_t choose_turns(const std::vector<int64_t>& possible, const std::vector<int64_t>& given) {
  for (const int64_t turns : given)
    if (turns && std::find(possible.begin(), possible.end(), turns) != possible.end()) return turns;
  return possible.size() == 1 ? possible.front() : 0;
}

// The rows of an operator that computes each element by itself, of arguments that are broadcast:
// those of all arguments have to be the same dimension of the result.
RowTurns compare_elements(const std::vector<at::Tensor>& tensors, const Rows& rows,
                          const std::vector<int64_t>& given, size_t returns) {
  std::optional<int64_t> from_last;
  std::vector<int64_t> turns;
  for (size_t i = 0; i < rows.dimensions.size(); ++i) {
    if (!rows.dimensions[i]) continue;
    const int64_t own = tensors[i].dim() - *rows.dimensions[i];
    if (from_last.value_or(own) != own) return {false, {}};
    from_last = own;
    turns.push_back(given[i]);
  }
  const bool is_known = !turns.empty() && std::all_of(turns.begin(), turns.end(),
                                                      [&](auto one) { return one == turns[0]; });
  return {true, std::vector<int64_t>(returns, is_known ? turns[0] : 0)};
}

}  // namespace

RowTurns compare_rows(const c10::OperatorHandle& op, const Stack& given, const CallArguments& alone,
                      const std::vector<int64_t>& given_turns) {
  const RowTurns unknown = {true, std::vector<int64_t>(op.schema().returns().size())};
  const std::vector<at::Tensor> tensors = list_tensors(given, given.size());
  const Rows rows = find_rows(alone.sizes, tensors);
  if (op.hasTag(at::Tag::pointwise))  // most of the memory is theirs
    return rows.segments ? compare_elements(tensors, rows, given_turns, unknown.turns.size())
                         : unknown;
  // Those of other libraries are refused, and may take no other values.
  if (!op.schema().name().starts_with("aten::")) return unknown;
  // Others, such as sparse ones, are not copied, and an operator may write them.
  const bool are_strided = std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return !tensor.defined() || tensor.layout() == at::kStrided;
  });
  if (!are_strided || !rows.segments) return unknown;
  const at::NoGradGuard guard;
  at::Generator generator = at::detail::createCPUGenerator(kSeed);
  // The positions of an index have to be those of its tensor.
  const bool has_index = op.schema().name().find("index") != std::string::npos;
  const bool is_integral =
      !has_index && std::none_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
        return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
      });
  Stack other = given;
  change_tensors(other, [&](const at::Tensor& tensor, size_t) {
    return make_other(tensor, is_integral, generator);
  });
  const auto together = try_call(op, other);
  if (!together) return unknown;
  int64_t most = 1;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (rows.dimensions[i])
      most = std::max(most, tensors[i].size(*rows.dimensions[i]) / rows.segments);
  // Finds the rows of a micro-batch, if those of arguments alternate so often.
  const auto compare = [&](int64_t segment, int64_t turns) {
    RowTurns found = unknown;
    Stack part = other;
    for (const auto& [position, value] : alone.plain)
      if (!part[position].isTensor()) part[position] = value;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      const std::optional<int64_t>& dimension = rows.dimensions[position];
      if (!dimension) return tensor;
      const bool alternates = tensor.size(*dimension) == most * rows.segments;
      const int64_t own = given_turns[position] ? given_turns[position] : alternates ? turns : 1;
      return take_rows(tensor, *dimension, segment, rows.segments, own);
    });
    const auto apart = try_call(op, part);
    // It fails for the positions of all samples.
    if (!apart || apart->size() != together->size()) return found;
    found.turns.resize(apart->size());
    for (size_t i = 0; i < apart->size(); ++i) {
      const auto possible = compare_result((*together)[i], (*apart)[i], segment, rows.segments);
      found.are_free = found.are_free && !possible.empty();
      found.turns[i] = choose_turns(possible, given_turns);
    }
    return found;
  };
  for (int64_t turns = 1; turns <= most; ++turns) {
    if (most % turns) continue;
    const RowTurns first = compare(0, turns);
    if (!first.are_free) continue;
    const RowTurns last = compare(rows.segments - 1, turns);
    if (last.are_free) return first.turns == last.turns ? first : unknown;
  }
  return {false, {}};
}

}  // namespace lockstep
