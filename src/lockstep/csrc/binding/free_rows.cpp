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

// Returns whether a result for all micro-batches has the rows of that for one, in any order by
// which they may alternate.
bool has_rows(const at::Tensor& all, const at::Tensor& one, int64_t segment, int64_t segments) {
  if (!all.defined() || !one.defined() || all.layout() != at::kStrided || !all.is_cpu() ||
      one.numel() == 0)
    return true;
  const std::optional<int64_t> dimension = find_grown(one.sizes(), all.sizes());
  if (!dimension || all.size(*dimension) != one.size(*dimension) * segments) return true;
  const int64_t rows = one.size(*dimension);
  const uint64_t expected = hash_bits(without_nan(one));
  for (int64_t turns = 1; turns <= rows; ++turns)
    if (rows % turns == 0 &&
        hash_bits(without_nan(take_rows(all, *dimension, segment, segments, turns))) == expected)
      return true;
  return false;
}

}  // namespace

bool are_rows_free(const c10::OperatorHandle& op, const Stack& given, const CallArguments& alone) {
  if (op.hasTag(at::Tag::pointwise)) return true;  // most of the memory is theirs
  // Those of other libraries are refused, and may take no other values.
  if (!op.schema().name().starts_with("aten::")) return true;
  const std::vector<at::Tensor> tensors = list_tensors(given, given.size());
  // Others, such as sparse ones, are not copied, and an operator may write them.
  const bool are_strided = std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return !tensor.defined() || tensor.layout() == at::kStrided;
  });
  if (!are_strided) return true;
  const Rows rows = find_rows(alone.sizes, tensors);
  if (!rows.segments) return true;
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
  if (!together) return true;
  int64_t most = 1;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (rows.dimensions[i])
      most = std::max(most, tensors[i].size(*rows.dimensions[i]) / rows.segments);
  // Returns whether a micro-batch has its rows, if those of arguments alternate so often.
  const auto fits = [&](int64_t segment, int64_t turns) {
    Stack part = other;
    for (const auto& [position, value] : alone.plain)
      if (!part[position].isTensor()) part[position] = value;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      const std::optional<int64_t>& dimension = rows.dimensions[position];
      if (!dimension) return tensor;
      const bool alternates = tensor.size(*dimension) == most * rows.segments;
      return take_rows(tensor, *dimension, segment, rows.segments, alternates ? turns : 1);
    });
    const auto apart = try_call(op, part);
    // It fails for the positions of all samples.
    if (!apart || apart->size() != together->size()) return true;
    for (size_t i = 0; i < apart->size(); ++i)
      if (!has_rows((*together)[i], (*apart)[i], segment, rows.segments)) return false;
    return true;
  };
  for (int64_t turns = 1; turns <= most; ++turns)
    if (most % turns == 0 && fits(0, turns) && fits(rows.segments - 1, turns)) return true;
  return false;
}

}  // namespace lockstep
