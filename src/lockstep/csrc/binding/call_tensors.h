// The arguments and results of an operator that a pass calls, as recorded_calls.h and
// segmented_calls.h read them from torch's stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

using torch::jit::Stack;

constexpr uintptr_t kAlignment = 64;  // of the memory that torch allocates

// What decides, beside the elements of tensors, what a call computes.
struct CallArguments {
  // The arguments that are no tensors, with their positions. A number that Python has made a tensor
  // counts as one.
  std::vector<std::pair<size_t, c10::IValue>> plain;
  // The shapes of the tensors, by the positions that `change_tensors` counts.
  std::vector<std::vector<int64_t>> sizes;
};

CallArguments describe_arguments(const c10::OperatorHandle& op, const Stack& stack);
// Returns whether a call gets what was described.
bool has_arguments(const c10::OperatorHandle& op, const Stack& stack,
                   const CallArguments& expected);
// Returns whether the numbers that Python has made tensors are those that were described.
bool has_numbers(const c10::OperatorHandle& op, const Stack& stack, const CallArguments& expected);

// The bits of a tensor, as one number.
uint64_t hash_bits(const at::Tensor& tensor);

// Values by tensors, as long as these exist.
template <typename Value>
class TensorMap {
 public:
  void set(const at::Tensor& tensor, Value value) {
    c10::TensorImpl* const key = tensor.unsafeGetTensorImpl();
    std::erase_if(entries_, [](const auto& entry) { return entry.second.first.expired(); });
    entries_.insert_or_assign(key, std::pair(Weak(tensor.getIntrusivePtr()), std::move(value)));
  }
  Value* find(const at::Tensor& tensor) {
    const auto entry = entries_.find(tensor.unsafeGetTensorImpl());
    // Another tensor may have been made where one of the entries was.
    if (entry == entries_.end() || entry->second.first.expired()) return nullptr;
    return &entry->second.second;
  }
  void clear() { entries_.clear(); }
  // Calls visit(tensor, value) for each entry.
  template <typename Visit>
  void visit(const Visit& visit) {
    for (auto& [key, entry] : entries_)
      if (!entry.first.expired()) visit(*key, entry.second);
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::unordered_map<c10::TensorImpl*, std::pair<Weak, Value>> entries_;
};

// Replaces each tensor by `change(tensor, position)`. Those of a list have positions of their own,
// also missing ones.
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

// The tensors among the last values of a stack, by the positions that `change_tensors` counts;
// missing ones are undefined.
std::vector<at::Tensor> list_tensors(const Stack& stack, size_t count);

// Returns whether a tensor has a class of its own, such as those with which a function is compiled,
// which have no memory.
bool has_subclass(const Stack& stack, size_t count);

// The dimension in which one shape is a multiple of another, if it is the only one that differs.
std::optional<int64_t> find_grown(at::IntArrayRef one, at::IntArrayRef several);

// The rows of one micro-batch, aligned as those of a separate pass.
at::Tensor take_rows(const at::Tensor& tensor, int64_t dimension, int64_t segment, int64_t segments,
                     int64_t turns = 1);

// Returns by how many turns a tensor may have the rows of a micro-batch that have a hash.
std::vector<int64_t> find_turns(const at::Tensor& tensor, int64_t dimension, int64_t segment,
                                int64_t segments, uint64_t hash);

// Joins the rows of micro-batches, in the memory layout of theirs where rows are outermost.
at::Tensor join_rows(const std::vector<at::Tensor>& rows, int64_t dimension);

}  // namespace lockstep
