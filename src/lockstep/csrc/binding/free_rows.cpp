#include "free_rows.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

namespace lockstep {
namespace {

constexpr uint64_t kSeed = 1;
constexpr int64_t kMany = 100;  // different integers, which fit in all types

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
//
// `most`: integers become smaller ones than this; 0: they stay as they are.
at::Tensor make_other(const at::Tensor& tensor, int64_t most, at::Generator& generator) {
  if (!tensor.defined() || tensor.is_complex() || tensor.layout() != at::kStrided ||
      !tensor.is_cpu() || tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
      (!tensor.is_floating_point() && most == 0))
    return tensor;
  at::Tensor other = tensor.is_non_overlapping_and_dense()
                         ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options())
                         : at::empty(tensor.sizes(), tensor.options());
  if (tensor.is_floating_point()) return other.normal_(0, 1, generator);
  return other.random_(0, most, generator);
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

// Returns by how many turns a result for all micro-batches may have the rows of that for one, or
// only that this is not known.
std::vector<int64_t> compare_result(const at::Tensor& all, const at::Tensor& one, int64_t segment,
                                    int64_t segments) {
  if (!all.defined() || !one.defined() || all.layout() != at::kStrided || !all.is_cpu() ||
      one.numel() == 0)
    return {kUnknownTurns};
  const std::optional<int64_t> dimension = find_grown(one.sizes(), all.sizes());
  if (!dimension || all.size(*dimension) != one.size(*dimension) * segments) return {kUnknownTurns};
  return find_turns(without_nan(all), *dimension, segment, segments, hash_bits(without_nan(one)));
}

// Of the turns that results may have, those of an argument, or else the only ones. Several fit
// integers by chance, and floats only if rows are equal.
int64_t choose_turns(const std::vector<int64_t>& possible, const std::vector<int64_t>& given,
                     bool is_float) {
  for (const int64_t turns : given)
    if (turns > 0 && std::find(possible.begin(), possible.end(), turns) != possible.end())
      return turns;
  return possible.size() == 1 || (is_float && !possible.empty()) ? possible.front() : kUnknownTurns;
}

// Returns whether rows may alternate in all ways, since they are equal.
bool are_all(const std::vector<int64_t>& possible, const at::Tensor& one, const at::Tensor& all) {
  const auto grown = find_grown(one.sizes(), all.sizes());
  if (!grown) return false;
  size_t divisors = 0;
  for (int64_t turns = 1; turns <= one.size(*grown); ++turns)
    divisors += one.size(*grown) % turns == 0;
  return possible.size() == divisors;
}

// How the rows of several arguments alternate, which have to do so in the same way.
int64_t combine_turns(const std::vector<std::optional<int64_t>>& dimensions,
                      const std::vector<int64_t>& given) {
  int64_t turns = kAnyTurns;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (!dimensions[i] || given[i] == kAnyTurns) continue;
    const bool is_same = turns == kAnyTurns || turns == given[i];
    turns = is_same ? given[i] : kMixedTurns;
  }
  return turns;
}

// Returns whether an operator that computes each element by itself gets the rows of all arguments,
// which are broadcast, in the same dimension of the result.
bool have_one_dimension(const std::vector<at::Tensor>& tensors, const Rows& rows) {
  std::optional<int64_t> from_last;
  for (size_t i = 0; i < rows.dimensions.size(); ++i) {
    if (!rows.dimensions[i]) continue;
    const int64_t own = tensors[i].dim() - *rows.dimensions[i];
    if (from_last.value_or(own) != own) return false;
    from_last = own;
  }
  return true;
}

bool has_word(const std::string& name, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return name.find(word) != std::string::npos; });
}

// The number of micro-batches whose rows are in results that have none in arguments; 0: there are
// none.
int64_t count_segments(const std::vector<at::Tensor>& together,
                       const std::vector<at::Tensor>& apart) {
  for (size_t i = 0; i < together.size() && i < apart.size(); ++i) {
    if (!together[i].defined() || !apart[i].defined()) continue;
    const auto grown = find_grown(apart[i].sizes(), together[i].sizes());
    if (grown) return together[i].size(*grown) / apart[i].size(*grown);
  }
  return 0;
}

}  // namespace

RowTurns compare_rows(const c10::OperatorHandle& op, const Stack& given, const CallArguments& alone,
                      const std::vector<int64_t>& given_turns) {
  const std::string& name = op.schema().name();
  const size_t returns = op.schema().returns().size();
  const RowTurns unknown = {true, std::vector<int64_t>(returns, kUnknownTurns)};
  const std::vector<at::Tensor> tensors = list_tensors(given, given.size());
  const Rows rows = find_rows(alone.sizes, tensors);
  const bool has_rows = rows.segments > 0;
  const int64_t combined = has_rows ? combine_turns(rows.dimensions, given_turns) : kUnknownTurns;
  if (combined == kMixedTurns) return {false, {}};
  if (op.hasTag(at::Tag::pointwise)) {  // most of the memory is theirs
    if (!has_rows) return unknown;
    return {have_one_dimension(tensors, rows), std::vector<int64_t>(returns, combined)};
  }
  // Those of other libraries are refused, and may take no other values.
  if (!name.starts_with("aten::")) return unknown;
  if (has_word(name, {"resize"})) return unknown;
  if (has_word(name, {"empty"}))  // memory as it is
    return {true, std::vector<int64_t>(returns, kAnyTurns)};
  if (name == "aten::arange") return {true, {1}};
  // Others, such as sparse ones, are not copied, and an operator may write them.
  const bool are_strided = std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return !tensor.defined() || tensor.layout() == at::kStrided;
  });
  if (!are_strided || rows.dimensions.size() != tensors.size()) return unknown;
  if (!has_rows && has_arguments(op, given, alone)) return unknown;
  const at::NoGradGuard guard;
  at::Generator generator = at::detail::createCPUGenerator(kSeed);
  // The positions of an index have to be those of its tensor.
  const bool has_index = has_word(name, {"index", "gather", "scatter", "take"});
  const bool is_integral = std::none_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
  });
  Stack other = given;
  change_tensors(other, [&](const at::Tensor& tensor, size_t position) {
    const bool is_mask = tensor.defined() && tensor.scalar_type() == at::kBool;
    const bool is_taken = has_index && position == 0 && !is_mask;  // any numbers
    const bool changes = has_index ? position == 0 : is_integral || is_mask;
    at::Tensor values = make_other(tensor, is_taken ? kMany : changes ? 2 : 0, generator);
    if (rows.dimensions[position] && given_turns[position] == kAnyTurns && !values.is_same(tensor))
      values.copy_(values.narrow(*rows.dimensions[position], 0, 1).clone().expand_as(values));
    return values;
  });
  const auto together = try_call(op, other);
  if (!together) return unknown;
  int64_t most = 1;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (rows.dimensions[i])
      most = std::max(most, tensors[i].size(*rows.dimensions[i]) / rows.segments);
  // Finds the rows of a micro-batch, if those of arguments alternate so often.
  const auto compare = [&](bool is_last, int64_t turns) {
    RowTurns found = unknown;
    Stack part = other;
    for (const auto& [position, value] : alone.plain)
      if (!part[position].isTensor()) part[position] = value;
    change_tensors(part, [&](const at::Tensor& tensor, size_t position) {
      const std::optional<int64_t>& dimension = rows.dimensions[position];
      if (!dimension) return tensor;
      const bool alternates = tensor.size(*dimension) == most * rows.segments;
      const int64_t known = given_turns[position];
      return take_rows(tensor, *dimension, is_last ? rows.segments - 1 : 0, rows.segments,
                       known > 0      ? known
                       : combined > 0 ? combined
                       : alternates   ? turns
                                      : 1);
    });
    const auto apart = try_call(op, part);
    // It fails for the positions of all samples.
    if (!apart || apart->size() != together->size()) return found;
    const int64_t segments = has_rows ? rows.segments : count_segments(*together, *apart);
    if (segments < 2) return found;
    found.turns.resize(apart->size());
    for (size_t i = 0; i < apart->size(); ++i) {
      const at::Tensor &one = (*apart)[i], &all = (*together)[i];
      const auto possible = compare_result(all, one, is_last ? segments - 1 : 0, segments);
      found.are_free = found.are_free && !possible.empty();
      if (!one.defined() || !all.defined()) continue;
      const bool may_be_equal = combined == kAnyTurns || !has_rows;
      if (has_word(name, {"_like", "new_"}) || (may_be_equal && are_all(possible, one, all)))
        found.turns[i] = kAnyTurns;
      else if (combined != kUnknownTurns || !has_rows)
        found.turns[i] = choose_turns(possible, given_turns, one.is_floating_point());
    }
    return found;
  };
  for (int64_t turns = 1; turns <= most; ++turns) {
    if (most % turns) continue;
    const RowTurns first = compare(false, turns);
    if (!first.are_free) continue;
    const RowTurns last = compare(true, turns);
    if (last.are_free) return first.turns == last.turns ? first : unknown;
  }
  return {false, {}};
}

}  // namespace lockstep
