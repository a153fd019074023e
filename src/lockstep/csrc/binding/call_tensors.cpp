#include "call_tensors.h"

#include <algorithm>

namespace lockstep {

std::vector<at::Tensor> list_tensors(const Stack& stack, size_t count) {
  Stack last(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
  std::vector<at::Tensor> tensors;
  change_tensors(last, [&](const at::Tensor& tensor, size_t) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
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
