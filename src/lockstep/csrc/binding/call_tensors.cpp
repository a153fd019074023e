#include "call_tensors.h"

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

// Calls visit(tensor, position) for the tensors among the last values of a stack that
// `change_tensors` would change, and for missing ones.
template <typename Visit>
void visit_tensors(const Stack& stack, size_t count, const Visit& visit) {
  size_t position = 0;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      visit(value.toTensor(), position++);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& part : value.toListRef())
        visit(part.isNone() ? at::Tensor() : part.toTensor(), position++);
    }
  }
}

bool is_number(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Python's values become tensors by this operator, for example in torch.tensor.
bool is_lift(const c10::OperatorHandle& op) {
  return op.schema().name().rfind("aten::lift", 0) == 0;
}

// What is compared of an argument; None for a tensor.
c10::IValue describe_value(const c10::OperatorHandle& op, const c10::IValue& value) {
  if (is_number(value)) return c10::IValue(value.toTensor().item());
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu() && is_lift(op))
    return c10::IValue(static_cast<int64_t>(hash_bits(value.toTensor())));
  const bool is_tensor = value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
  return is_tensor ? c10::IValue() : value;
}

bool is_same_value(const c10::IValue& one, const c10::IValue& other) {
  if (one.tagKind() != other.tagKind()) return false;
  if (one.isDouble()) {
    const double a = one.toDouble(), b = other.toDouble();
    return a == b || (a != a && b != b);
  }
  if (one.isComplexDouble()) return one.toComplexDouble() == other.toComplexDouble();
  if (one.isInt()) return one.toInt() == other.toInt();
  if (one.isBool()) return one.toBool() == other.toBool();
  if (one.isString()) return one.toStringRef() == other.toStringRef();
  if (one.isIntList()) return one.toIntVector() == other.toIntVector();
  if (one.isBoolList()) return one.toBoolList() == other.toBoolList();
  if (one.isDoubleList()) return one.toDoubleVector() == other.toDoubleVector();
  return true;
}

}  // namespace

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

CallArguments describe_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  const size_t count = op.schema().arguments().size(), first = stack.size() - count;
  CallArguments described;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue value = describe_value(op, stack[first + i]);
    const bool is_plain = !value.isNone() || stack[first + i].isNone();
    if (is_plain) described.plain.emplace_back(i, std::move(value));
  }
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t) {
    described.sizes.push_back(tensor.defined() ? tensor.sizes().vec() : std::vector<int64_t>());
  });
  return described;
}

bool has_arguments(const c10::OperatorHandle& op, const Stack& stack,
                   const CallArguments& expected) {
  const size_t count = op.schema().arguments().size(), first = stack.size() - count;
  for (const auto& [i, value] : expected.plain)
    if (!is_same_value(value, describe_value(op, stack[first + i]))) return false;
  bool is_same = true;
  size_t tensors = 0;
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t position) {
    ++tensors;
    is_same = is_same && position < expected.sizes.size() &&
              (tensor.defined() ? tensor.sizes() == at::IntArrayRef(expected.sizes[position])
                                : expected.sizes[position].empty());
  });
  return is_same && tensors == expected.sizes.size();
}

bool has_numbers(const c10::OperatorHandle& op, const Stack& stack, const CallArguments& expected) {
  const size_t first = stack.size() - op.schema().arguments().size();
  return std::all_of(expected.plain.begin(), expected.plain.end(), [&](const auto& argument) {
    const c10::IValue& value = stack[first + argument.first];
    return !value.isTensor() || is_same_value(argument.second, describe_value(op, value));
  });
}

std::vector<at::Tensor> list_tensors(const Stack& stack, size_t count) {
  std::vector<at::Tensor> tensors;
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t) { tensors.push_back(tensor); });
  return tensors;
}

std::optional<int64_t> find_grown(at::IntArrayRef one, at::IntArrayRef several) {
  std::optional<int64_t> grown;
  if (one.size() != several.size()) return grown;
  for (size_t d = 0; d < one.size(); ++d) {
    if (one[d] == several[d]) continue;
    if (grown || one[d] == 0 || several[d] == 0 || several[d] % one[d]) return std::nullopt;
    grown = static_cast<int64_t>(d);
  }
  return grown;
}

std::vector<int64_t> find_turns(const at::Tensor& tensor, int64_t dimension, int64_t segment,
                                int64_t segments, uint64_t hash) {
  std::vector<int64_t> found;
  const int64_t rows = tensor.size(dimension) / segments;
  for (int64_t turns = 1; turns <= rows; ++turns)
    if (rows % turns == 0 &&
        hash_bits(take_rows(tensor, dimension, segment, segments, turns)) == hash)
      found.push_back(turns);
  return found;
}

at::Tensor join_rows(const std::vector<at::Tensor>& rows, int64_t dimension) {
  const at::Tensor& one = rows.front();
  const auto has_layout = [&](const at::Tensor& part) {
    return part.sizes() == one.sizes() && part.strides() == one.strides();
  };
  const bool is_outermost = one.is_non_overlapping_and_dense() &&
                            one.stride(dimension) * one.size(dimension) == one.numel() &&
                            std::all_of(rows.begin(), rows.end(), has_layout);
  if (one.is_contiguous() || !is_outermost) return at::cat(rows, dimension);
  std::vector<int64_t> sizes = one.sizes().vec();
  sizes[static_cast<size_t>(dimension)] *= std::ssize(rows);
  const at::Tensor joined = at::empty_strided(sizes, one.strides(), one.options());
  int64_t first = 0;
  for (const at::Tensor& part : rows) {
    joined.narrow(dimension, first, part.size(dimension)).copy_(part);
    first += part.size(dimension);
  }
  return joined;
}

bool has_subclass(const Stack& stack, size_t count) {
  const auto is_subclass = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().key_set().has(c10::DispatchKey::Python);
  };
  return std::any_of(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end(),
                     [&](const c10::IValue& value) {
                       if (!value.isTensorList() && !value.isOptionalTensorList())
                         return is_subclass(value);
                       const auto parts = value.toListRef();
                       return std::any_of(parts.begin(), parts.end(), is_subclass);
                     });
}

at::Tensor take_rows(const at::Tensor& tensor, int64_t dimension, int64_t segment, int64_t segments,
                     int64_t turns) {
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

}  // namespace lockstep
