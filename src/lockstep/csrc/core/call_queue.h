// Runs the collective calls of a group one at a time, in the order in which they were made.
//
// A synchronous call runs in its caller's thread. Asynchronous calls are queued; they run
// in a thread of the queue, or in the first thread that waits for one of them, so that no
// other thread need be woken. The queue's thread starts with the first queued call and
// sleeps while there is none.
//
// A call that has to wait for other ranks can be queued without waking a thread, so that its caller
// computes meanwhile, and lets it advance from time to time.
//
// A call's future may have callbacks that make further calls and wait for them (torch's
// PowerSGD does). So callbacks run without the execution lock, and while all threads of
// the queue are in callbacks another one is started for the calls that are queued.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "threads.h"

namespace lockstep {

// How far a call has got without waiting for other ranks.
enum class Progress {
  waiting,  // for other ranks; the calls behind it must not begin
  passed,   // the calls behind it may begin; it is executed once other ranks have got here, too
  executed,
};

class QueuedCall {
 public:
  virtual ~QueuedCall() = default;
  // Takes the steps of the call that need not wait, under the execution lock; must not throw.
  // `execute` takes the others.
  virtual Progress advance() { return Progress::waiting; }
  virtual void execute(bool is_background) = 0;  // under the execution lock; must not throw
  virtual bool is_executed() = 0;
  // Called once after `execute`, without the lock: wakes waiting threads. Returns whether
  // there are callbacks to run.
  virtual bool complete() = 0;
  virtual void run_callbacks() = 0;
};

class CallQueue {
 public:
  // A thread that waits for the execution lock calls `poll_signals` regularly; it may throw.
  explicit CallQueue(std::function<void()> poll_signals = [] {});
  ~CallQueue();
  void poll_signals() { poll_signals_(); }
  // `wakes`: the queue's thread executes the call. Otherwise it is executed by `advance`, by the
  // calls that are made after it, or by a thread that waits for it.
  void add(std::shared_ptr<QueuedCall> call, bool wakes = true);
  // Lets calls that are queued advance in this thread. Does not wait.
  void advance();
  // Runs the calls queued before, then `call`, in this thread.
  void run(QueuedCall& call);
  // Returns once a queued call was executed; runs it in this thread unless another thread
  // already does.
  void help_until_executed(QueuedCall& call);
  void stop();  // after all queued calls were executed

 private:
  std::unique_lock<std::timed_mutex> lock_execution();
  void start_thread();
  void run_thread();
  void complete_in_thread(QueuedCall& call);
  std::shared_ptr<QueuedCall> pop();

  std::mutex mutex_;                  // guards everything below
  std::timed_mutex execution_mutex_;  // held while a call is executed
  std::condition_variable changed_;
  std::deque<std::shared_ptr<QueuedCall>> queue_;
  bool stopping_ = false;
  ThreadGroup threads_;
  size_t running_threads_ = 0;
  size_t threads_in_callbacks_ = 0;  // of the running threads
  const std::function<void()> poll_signals_;
};

}  // namespace lockstep
