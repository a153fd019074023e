// The c10d backend "lockstep" of a group whose ranks are on several hosts.
//
// Its collective calls are those of CollectiveBackend. What moves data is behind HostCalls, which
// is implemented in Python (python_host_calls.h, lockstep/comm/hosts/backend.py): it combines the
// native group of this host with connections to the other hosts. Every call runs in the thread of
// the queue, so that the thread that made it can handle signals while it waits.
#pragma once

#include "collective_backend.h"
#include "threads.h"

namespace lockstep {

class HostCalls : public CollectiveBackend::Runner {
 public:
  virtual WorkPtr post_message(c10d::OpType type, Tensors& tensors, int peer, int tag) = 0;
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  virtual void set_name(const std::string& name) = 0;
  virtual void note_caller(unsigned long thread) = 0;  // the thread that makes the next call
  virtual void poll_signals() = 0;  // aborts the group and throws what a signal handler raised
  virtual std::string describe_caller() = 0;  // "rank 3, in train.py:31 (step)"
  virtual bool is_aborted() = 0;
  virtual void abort() = 0;
  virtual void shutdown() = 0;
};

class HostsBackend : public CollectiveBackend {
 public:
  HostsBackend(int rank, int size, std::chrono::milliseconds timeout, const std::string& name,
               const std::vector<int>& ranks, std::shared_ptr<HostCalls> calls);
  ~HostsBackend() override;

  const std::shared_ptr<HostCalls>& host_calls() const { return host_calls_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Not in c10d: starts the sum of a bucket (lockstep/comm/hosts/all_reduce.py), which `body`
  // makes when the earlier calls of the group are done. `result` is the memory of the sums.
  WorkPtr reproducible_all_reduce(const at::Tensor& result, Body body);

 private:
  WorkPtr start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) override;
  void check_permitted(Op op) override;
  void note_caller(unsigned long thread) override { host_calls_->note_caller(thread); }
  void set_name(const std::string& name) override { host_calls_->set_name(name); }

  std::shared_ptr<HostCalls> host_calls_;
};

// A message to or from a rank on another host. The thread that moves its data calls `finish`.
class HostMessageWork : public FutureWork {
 public:
  // `fail_late` is called if the message is not finished within the timeout after a thread has
  // begun to wait; it must finish the message with an error.
  HostMessageWork(c10d::OpType type, const at::Tensor& tensor, std::chrono::milliseconds timeout,
                  std::function<void()> poll_signals, std::function<void()> fail_late,
                  std::shared_ptr<CallbackPool> callbacks);
  const at::Tensor& buffer() const { return buffer_; }  // contiguous
  // Only the first call counts. An empty error means that the message has arrived.
  void finish(int source, const std::string& error);
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return source_; }

 private:
  const std::chrono::milliseconds timeout_;
  const std::function<void()> poll_signals_, fail_late_;
  const std::shared_ptr<CallbackPool> callbacks_;
  at::Tensor buffer_;
  std::optional<OutputTensor> output_;
  std::atomic<bool> is_finished_{false};
  int source_ = -1;
};

}  // namespace lockstep
