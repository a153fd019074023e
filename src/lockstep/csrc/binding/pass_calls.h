// Sees the operators that a forward or backward pass calls in a thread.
//
//     recorded_calls.h     notes their names, arguments and results
//     segmented_calls.h    calls some of them for the rows of each micro-batch
//
// An operator is seen as autograd or Python calls it, before it is divided into others. Those that
// are known to draw are divided, since what they call has a generator as an argument, and batch
// norm, since what it calls returns its statistics.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>

namespace lockstep {

using torch::jit::Stack;

// Sees every operator that a body calls in its thread.
class PassCalls : public std::enable_shared_from_this<PassCalls> {
 public:
  // `joins_losses`: whether a loss has one row per micro-batch (segmented_loss.h).
  explicit PassCalls(bool joins_losses) : joins_losses_(joins_losses) {}
  virtual ~PassCalls() = default;
  pybind11::object run(const pybind11::function& body);
  // Sees what this thread calls until `end`, which another thread may call. Raises if another one
  // does so already.
  void begin();
  void end();
  bool has_ended() const { return has_ended_; }
  bool joins_losses() const { return joins_losses_; }
  virtual void call(const c10::OperatorHandle& op, Stack* stack) = 0;

 private:
  const bool joins_losses_;
  std::atomic<bool> has_ended_ = false;
};

}  // namespace lockstep
