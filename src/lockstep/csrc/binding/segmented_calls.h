// The operators of a recorded pass, called in the same order again: those that add up the rows of
// several micro-batches are called for the rows of each, and the results added along the tree;
// those that draw random numbers are called for the rows of each, with a generator of its own, and
// batch norm with running statistics of its own.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call_tensors.h"
#include "pass_calls.h"
#include "segmented_norm.h"

namespace lockstep {

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
  // Its name, its overload, how it is called, and its arguments, as RecordedCalls describes them.
  using Expected =
      std::tuple<std::string, std::string, std::optional<SegmentRule>, pybind11::capsule>;
  // Returns what an operator returns for these arguments of all micro-batches, nothing if it has to
  // be called for each of them.
  using Total = std::vector<at::Tensor> (*)(const c10::IValue* arguments, int64_t segments,
                                            const SegmentRule& rule);
  SegmentedCalls(const std::vector<Expected>& calls, int64_t segments, bool joins_losses);
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  void restart();
  // Adds the parts of the gradients of parameters, after the backward pass.
  void finish(const std::vector<at::Tensor>& parameters);
  // Seeds the generator of each micro-batch for a call of a scope, when an operator draws. The
  // prefixes are the first parts of their keys.
  void seed(const std::vector<std::string>& prefixes, int64_t scope, int64_t call);
  // The running mean or variance after each micro-batch; nothing for other tensors.
  std::optional<std::vector<at::Tensor>> find_statistics(const at::Tensor& running);
  // The first operator that was not expected, or that was not called; "" if there is none.
  std::string find_difference() const;
  // How many running means and variances micro-batches have changed.
  int64_t count_statistics() const { return statistics_.count; }
  // Whether an operator has got one of them afterwards.
  bool reads_statistics() const { return reads_statistics_; }

 private:
  void call_segments(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack);
  void draw(const c10::OperatorHandle& op, const SegmentRule& rule, Stack* stack);
  void call_parts(const c10::OperatorHandle& op, Stack* stack);
  struct Call {
    c10::OperatorHandle op;
    std::optional<SegmentRule> rule;
    CallArguments arguments;
    Total total;
    bool is_norm;
  };
  bool gets_statistics(const c10::OperatorHandle& op, const Stack& stack) const;
  bool try_total(const Call& call, Stack* stack) const;
  std::vector<Call> calls_;
  size_t next_ = 0;
  int64_t segments_;
  std::vector<at::Generator> generators_;  // none if no operator draws
  std::vector<uint64_t> seeds_;            // that they get before the next draw
  // Those of the second micro-batch and of further ones, by the tensor of the first.
  TensorMap<std::vector<at::Tensor>> parts_;
  RunningStatistics statistics_;
  bool reads_statistics_ = false;
  std::string difference_;
};

}  // namespace lockstep
