// torch's Work objects for collective calls and messages.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "call_queue.h"
#include "point_to_point.h"
#include "process.h"
#include "tensors.h"

namespace lockstep {

// A Work whose future is created on demand. It is an event of torch's profilers.
class FutureWork : public c10d::Work {
 public:
  // `inputs` are the tensors of the profiler's event, the outputs if null.
  FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs,
             const std::vector<at::Tensor>* inputs = nullptr);
  std::vector<at::Tensor> result() override { return outputs_; }
  bool isCompleted() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  // Wakes waiting threads. Returns whether there is a future, to be completed by
  // `run_callbacks`.
  bool complete(std::exception_ptr error);
  // Completes the future, with no lock held: a callback may take the interpreter's lock,
  // which Python keeps in `is_completed` and `get_future` while they take `mutex_`.
  void run_callbacks();
  virtual c10::IValue value() const { return outputs_; }  // of the future
  // Waits until the future, if there is one, is complete; its callbacks may still run.
  void wait_future();
  bool is_future_completed();  // true if there is none
  // Sleeps until the work is completed, and rethrows its error. It calls `poll` after every slice
  // of sleep.
  void sleep_until_completed(std::chrono::milliseconds timeout, const std::function<void()>& poll);
  // Throws in a process that was forked from the one that made the call.
  void check_process() const;
  std::vector<at::Tensor> outputs_;

 private:
  const int owner_pid_ = current_pid();
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CollectiveWork : public FutureWork {
 public:
  // `body` executes the call; its argument says whether it runs in a background thread.
  // `advance`: see QueuedCall; the call is queued without waking the queue's thread then.
  CollectiveWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                 const std::vector<at::Tensor>* inputs, std::shared_ptr<CallQueue> queue,
                 std::function<void(bool)> body, std::function<Progress()> advance = nullptr);
  void start(bool is_async);
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  class Execution;
  std::shared_ptr<CallQueue> queue_;
  std::function<void(bool)> body_;
  std::function<Progress()> advance_;
  std::shared_ptr<Execution> execution_;
};

class MessageWork : public FutureWork {
 public:
  // `buffer` is what is sent or received into; `output` copies what was received to the
  // user's tensor.
  MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<PointToPoint> p2p,
              at::Tensor buffer, std::optional<OutputTensor> output);
  // Posts the message. It keeps this object alive until it is done; no caller needs to.
  void start(Op op, int peer, int64_t tag, std::chrono::milliseconds timeout);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  class PostedMessage;
  bool complete_message();

  std::shared_ptr<PointToPoint> p2p_;
  std::shared_ptr<PostedMessage> message_;
  at::Tensor buffer_;
  std::optional<OutputTensor> output_;
};

// Several works as one (coalesced calls).
class CompositeWork : public FutureWork {
 public:
  // `lists` is the value of the future.
  CompositeWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
                std::vector<std::vector<at::Tensor>> lists);
  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  // Waits for all works, even if one of them fails.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  c10::IValue value() const override { return lists_; }

 private:
  void count_completed();

  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<std::vector<at::Tensor>> lists_;
  std::atomic<bool> has_callbacks_{false};  // on the works, since `getFuture`
  std::atomic<size_t> remaining_;           // works that have not completed
};

}  // namespace lockstep
