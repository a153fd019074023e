// The operators that a pass calls, recorded: their names, arguments and results, of tensors only
// the shapes.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "call_tensors.h"
#include "pass_calls.h"
#include "segmented_norm.h"

namespace lockstep {

// A tensor that an operator got or returned.
struct CallTensor {
  std::vector<int64_t> sizes, strides;  // no strides if the memory is laid out in another way
  int64_t element_size = 0;             // 0: the tensor is undefined
  bool is_floating_point = false, is_dense = false;
};

// The bits of a tensor; no hash if they cannot be read.
struct TensorBits {
  at::ScalarType type = at::ScalarType::Undefined;
  std::vector<int64_t> sizes;
  std::optional<uint64_t> hash;
};

class RecordedCalls : public PassCalls {
 public:
  // `restores`: the state of the default generator after the pass, whose results do not count.
  // `keeps`: hashes of the arguments, with which a pass over several micro-batches, the first of
  // which is the same, compares its own, if this one is its `first`.
  // `first`: of a pass over several micro-batches, that over the last one, whose own `first` is the
  // pass over the first one; or that over the first one.
  RecordedCalls(bool restores, bool keeps, bool joins_losses,
                std::shared_ptr<const RecordedCalls> first)
      : PassCalls(joins_losses), restores_(restores), keeps_(keeps), first_(std::move(first)) {}
  pybind11::object run(const pybind11::function& body);
  void end();
  void call(const c10::OperatorHandle& op, Stack* stack) override;
  void seed(const std::vector<std::string>&, int64_t, int64_t) {}
  void finish(const std::vector<at::Tensor>&) {}
  // Notes the tensors of the batch, before a forward pass. What is computed from them has rows,
  // whose order is then known, and may have a loss.
  void note_samples(const std::vector<at::Tensor>& tensors);
  // Returns whether the rows of micro-batches follow each other in a tensor.
  bool is_in_order(const at::Tensor& tensor);
  // (name, overload, arguments, results, whether it has drawn, for each tensor among the arguments
  // the numbers of turns by which its first rows may be those of `first`, the numbers of the calls
  // that have returned the tensors, -1 for others, whether the rows of the results are those of
  // the passes over one micro-batch, also for other values, and what SegmentedCalls expects)
  pybind11::list calls;
  // The numbers of rows of results, and of the turns in which these alternate, as RowTurns has
  // them.
  std::set<std::pair<int64_t, int64_t>> orders;

 private:
  void note_subclass(const c10::OperatorHandle& op);
  const CallArguments* find_alone(const c10::OperatorHandle& op) const;
  pybind11::list compare_arguments(const Stack& stack, size_t count);
  pybind11::list find_sources(const Stack& stack, size_t count);
  void remember_results(const Stack& stack, size_t count, bool is_of_samples);
  // The order of the rows of a tensor.
  struct RowOrder {
    int64_t rows = 0, turns = 0;  // turns: see RowTurns
  };
  void note_results(const Stack& stack, size_t count, const std::vector<RowOrder>& orders,
                    bool are_losses);
  void note_writes(const std::vector<at::Tensor>& given, const std::vector<int64_t>& given_turns,
                   const Stack& stack, size_t count, const std::vector<RowOrder>& orders);
  std::vector<int64_t> list_turns(const Stack& stack, size_t count);
  // Lets the first and the last micro-batch have the numbers that their own passes have drawn.
  void repeat_draw(const Stack& stack);
  bool compare_results(const Stack& stack, size_t count, std::vector<RowOrder>& orders);
  void note_draw(const at::Tensor& before, at::Tensor after);
  void restore_generator();
  bool restores_, keeps_;
  std::shared_ptr<const RecordedCalls> first_;
  std::vector<std::vector<TensorBits>> kept_;      // of each call
  std::unordered_map<int64_t, at::Tensor> drawn_;  // by the numbers of the calls
  std::vector<std::vector<TensorBits>> results_;   // of each call; empty if not compared
  at::Tensor first_state_, last_state_;            // of the generator, around all draws
  bool has_other_draws_ = false;                   // which no operator has made
  TensorMap<int64_t> returned_;                    // by which call
  TensorMap<bool> of_samples_;                     // the tensors of the batch, and their results
  TensorMap<RowOrder> orders_;                     // of the rows of micro-batches
  bool has_samples_ = false;                       // whether the order of rows is known
  TensorMap<bool> losses_;                         // one per micro-batch
  RunningStatistics statistics_;                   // of a pass over several micro-batches
};

}  // namespace lockstep
