// The operators that a forward or backward pass calls.
//
//     recorded     their names, arguments and results, of tensors only the shapes
//     segmented    the same operators in the same order again; those that add up the rows of
//                  several micro-batches are called for the rows of each, and the results added
//                  along the tree; those that draw random numbers are called for the rows of each,
//                  with a generator of its own
//
// An operator is seen as autograd or Python calls it, before it is divided into others. Those that
// are known to draw are divided, since what they call has a generator as an argument.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {

using torch::jit::Stack;

// Sees every operator that a body calls in its thread.
class PassCalls : public std::enable_shared_from_this<PassCalls> {
 public:
  virtual ~PassCalls() = default;
  pybind11::object run(const pybind11::function& body);
  // Sees what this thread calls until `end`, which another thread may call. Raises if another one
  // does so already.
  void begin();
  void end();
  bool has_ended() const { return has_ended_; }
  virtual void call(const c10::OperatorHandle& op, Stack* stack) = 0;

 private:
  std::atomic<bool> has_ended_ = false;
};

// The arguments of a call that are no tensors, with their positions.
using PlainArguments = std::vector<std::pair<size_t, c10::IValue>>;

// A tensor that an operator got or returned.
struct CallTensor {
  std::vector<int64_t> sizes;
  int64_t element_size = 0;  // 0: the tensor is undefined
  bool is_floating_point = false, is_dense = false;
};

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

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::unordered_map<c10::TensorImpl*, std::pair<Weak, Value>> entries_;
};

class RecordedCalls : public PassCalls {
 public:
  // `restores`: the state of the default generator after the pass, whose results do not count.
  // `keeps`: copies of the arguments, with which a pass over several micro-batches, the first of
  // which is the same, compares its own, if this one is its `first`.
  // `first`: of a pass over several micro-batches, that over the last one, whose own `first` is the
  // pass over the first one; or that over the first one.
  RecordedCalls(bool restores, bool keeps, std::shared_ptr<const RecordedCalls> first)
      : restores_(restores), keeps_(keeps), first_(std::move(first)) {}
  pybind11::object run(const pybind11::function& body);
  void end();
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  void seed(const std::vector<uint64_t>&) {}
  void finish(const std::vector<at::Tensor>&) {}
  // (name, overload, arguments, results, whether it has drawn, for each tensor among the arguments
  // the numbers of turns by which its first rows may be those of `first`, the numbers of the calls
  // that have returned the tensors, -1 for others, whether the rows of the results are those of
  // the passes over one micro-batch, and the arguments that are no tensors, for SegmentedCalls)
  pybind11::list calls;

 private:
  void note_subclass(const c10::OperatorHandle& op);
  pybind11::list compare_arguments(const Stack& stack, size_t count);
  pybind11::list find_sources(const Stack& stack, size_t count);
  void remember_results(const Stack& stack, size_t count);
  // Lets the first and the last micro-batch have the numbers that their own passes have drawn.
  void repeat_draw(const Stack& stack);
  bool compare_results(const Stack& stack, size_t count);
  void note_draw(const at::Tensor& before, at::Tensor after);
  void restore_generator();
  struct Bits {
    std::vector<int64_t> sizes;
    uint64_t hash = 0;
  };
  bool restores_, keeps_;
  std::shared_ptr<const RecordedCalls> first_;
  std::vector<std::vector<at::Tensor>> kept_;      // of each call
  std::unordered_map<int64_t, at::Tensor> drawn_;  // by the numbers of the calls
  std::vector<std::vector<Bits>> results_;         // of each call; empty if not compared
  at::Tensor first_state_, last_state_;            // of the generator, around all draws
  bool has_other_draws_ = false;                   // which no operator has made
  TensorMap<int64_t> returned_;                    // by which call
};

// How an operator is called for the rows of each micro-batch.
//
//     dimension 1 of the shape (2, 12) for 3 micro-batches:
//     1 turn     0 0 0 0 1 1 1 1 2 2 2 2
//     2 turns    0 0 1 1 2 2 0 0 1 1 2 2
struct SegmentRule {
  std::vector<std::pair<size_t, int64_t>> slices;  // tensors by their position, and their dimension
  std::vector<int64_t> results;                    // the dimension of the rows; -1: is added
  std::vector<std::pair<size_t, int64_t>> sizes;   // arguments, and their values for a micro-batch
  bool draws = false;                              // each micro-batch has a generator
  int64_t turns = 1;                               // in which the rows of micro-batches alternate
  bool keeps_parts = false;                        // what would be added is added by `finish`
};

class SegmentedCalls : public PassCalls {
 public:
  // Its name, its overload, how it is called, and its arguments, as RecordedCalls notes them.
  using Expected =
      std::tuple<std::string, std::string, std::optional<SegmentRule>, pybind11::capsule>;
  SegmentedCalls(const std::vector<Expected>& calls, int64_t segments);
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  void restart();
  // Adds the parts of the gradients of parameters, after the backward pass.
  void finish(const std::vector<at::Tensor>& parameters);
  // Seeds the generator of each micro-batch.
  void seed(const std::vector<uint64_t>& seeds);
  // The first operator that was not expected, or that was not called; "" if there is none.
  std::string find_difference() const;

 private:
  void call_segments(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack);
  void draw(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack);
  void call_parts(const c10::OperatorHandle& op, Stack* stack);
  struct Call {
    c10::OperatorHandle op;
    std::optional<SegmentRule> rule;
    PlainArguments arguments;
  };
  std::vector<Call> calls_;
  size_t next_ = 0;
  int64_t segments_;
  std::vector<at::Generator> generators_;  // none if no operator draws
  // Those of the second micro-batch and of further ones, by the tensor of the first.
  TensorMap<std::vector<at::Tensor>> parts_;
  std::string difference_;
};

}  // namespace lockstep
