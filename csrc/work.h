// What a call returns: torch's Work for collectives and for messages.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <vector>

#include "mail.h"
#include "queue.h"

namespace lockstep {

// Turns an error of the core into torch's; for use in a catch block.
std::exception_ptr as_torch_error();

// A Work whose future is made only when it is asked for.
class FutureWork : public c10d::Work {
 public:
  FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs);
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  bool settle(std::exception_ptr error);  // wake who waits; true if a future is yet to be told
  void announce();                        // tell it: this runs its callbacks
  void complete(std::exception_ptr error);
  std::vector<at::Tensor> outputs_;

 private:
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
  // `after` copies a received message to where it belongs, if it went elsewhere.
  MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs, std::shared_ptr<Mail> mail,
              Post message, at::Tensor kept, std::function<void()> after);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return message_->source; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void conclude();

  std::shared_ptr<Mail> mail_;
  Post message_;
  at::Tensor kept_;
  std::function<void()> after_;
  std::mutex concluding_;
  bool concluded_ = false;
  std::atomic<bool> notified_{false};
};

// Several works as one.
class ManyWork : public c10d::Work {
 public:
  explicit ManyWork(std::vector<c10::intrusive_ptr<c10d::Work>> works);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace lockstep
