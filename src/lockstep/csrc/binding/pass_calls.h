// The operators that a forward or backward pass calls.
//
//     recorded     their names, arguments and results, of tensors only the shapes
//     segmented    the same operators in the same order again; those that add up the rows of
//     several
//                  micro-batches are called for the rows of each, and the results added along the
//                  tree
//
// An operator is seen as autograd or Python calls it, before it is divided into others.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lockstep {

using torch::jit::Stack;

// Sees every operator that a body calls in its thread.
class PassCalls {
 public:
  virtual ~PassCalls() = default;
  pybind11::object run(const pybind11::function& body);
  virtual void call(const c10::OperatorHandle& op, Stack* stack) = 0;
};

// A tensor that an operator got or returned.
struct CallTensor {
  std::vector<int64_t> sizes;
  int64_t element_size = 0;  // 0: the tensor is undefined
  bool is_floating_point = false, is_dense = false;
};

class RecordedCalls : public PassCalls {
 public:
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  pybind11::list calls;  // (name, overload, arguments, results)
};

// How an operator is called for the rows of each micro-batch.
struct SegmentRule {
  std::vector<std::pair<size_t, int64_t>> slices;  // tensors by their position, and their dimension
  std::vector<int64_t> results;                    // the dimension of the rows; -1: is added
  std::vector<std::pair<size_t, int64_t>> sizes;   // arguments, and their values for a micro-batch
};

class SegmentedCalls : public PassCalls {
 public:
  using Expected = std::tuple<std::string, std::string, std::optional<SegmentRule>>;
  SegmentedCalls(const std::vector<Expected>& calls, int64_t segments);
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  void restart();
  // The first operator that was not expected, or that was not called; "" if there is none.
  std::string find_difference() const;

 private:
  void call_segments(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack);
  std::vector<std::pair<c10::OperatorHandle, std::optional<SegmentRule>>> calls_;
  size_t next_ = 0;
  int64_t segments_;
  std::string difference_;
};

}  // namespace lockstep
