// What a call returns: torch's Work for collectives and for messages.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "mail.h"
#include "process.h"
#include "queue.h"
#include "tensors.h"

namespace lockstep {

// Turns an error of the core into torch's; for use in a catch block.
std::exception_ptr as_torch_error();

// A Work whose future is made only when it is asked for.
class FutureWork : public c10d::Work {
 public:
  FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs);
  std::vector<at::Tensor> result() override { return outputs_; }
  bool isCompleted() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  bool settle(std::exception_ptr error);  // wake who waits; true if a future is yet to be told
  void announce();                        // tell it: this runs its callbacks
  virtual c10::IValue value() const { return outputs_; }  // what it is told
  // Who waited sees a future that is complete; its callbacks may still run.
  void await_future();
  bool has_told();  // its future, if there is one
  // Throws in a process that was forked from the one that made the call.
  void check_process() const;
  std::vector<at::Tensor> outputs_;

 private:
  const int process_ = this_process();  // which made the call
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CollectiveWork : public FutureWork {
 public:
  // `body` does the call; its argument says whether it runs in the background.
  CollectiveWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                 std::shared_ptr<Queue> queue, std::function<void(bool)> body);
  void start(bool asynchronous);
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  class Run;
  std::shared_ptr<Queue> queue_;
  std::function<void(bool)> body_;
  std::shared_ptr<Run> run_;
};

class MessageWork : public FutureWork {
 public:
  // `kept` is what is sent, or what is received into; `written` says where that belongs.
  MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Mail> mail,
              at::Tensor kept, std::optional<Writable> written);
  // Posts the message, which holds this object until it is over: nobody else needs to.
  void start(Op op, int peer, int64_t tag, std::chrono::milliseconds timeout);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  class Held;
  bool conclude();

  std::shared_ptr<Mail> mail_;
  std::shared_ptr<Held> message_;
  at::Tensor kept_;
  std::optional<Writable> written_;
};

// Several works as one.
class ManyWork : public FutureWork {
 public:
  // `lists` is what the future is told.
  ManyWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
           std::vector<std::vector<at::Tensor>> lists);
  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  // Waits for all of them, also where one fails.
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  c10::IValue value() const override { return lists_; }

 private:
  void count();

  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<std::vector<at::Tensor>> lists_;
  std::atomic<bool> asked_{false};
  std::atomic<size_t> left_;  // of works that have not told us
};

}  // namespace lockstep
