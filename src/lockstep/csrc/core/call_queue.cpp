#include "call_queue.h"

#include <pthread.h>

#include <vector>

#include "activity.h"
#include "sync.h"

namespace lockstep {

CallQueue::CallQueue(std::function<void()> poll_signals) : poll_signals_(std::move(poll_signals)) {}

CallQueue::~CallQueue() { stop(); }

void CallQueue::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  if (!queue_.empty() && running_threads_ == threads_in_callbacks_) start_thread();
  changed_.notify_all();
  threads_.join(lock);
}

void CallQueue::start_thread() {
  threads_.start([this] { run_thread(); });
  ++running_threads_;
}

void CallQueue::add(std::shared_ptr<QueuedCall> call, bool wakes) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(call));
  if (!wakes) return;
  if (running_threads_ == threads_in_callbacks_) start_thread();
  changed_.notify_one();
}

void CallQueue::advance() {
  std::vector<std::shared_ptr<QueuedCall>> executed;
  {
    const std::unique_lock<std::timed_mutex> lock(execution_mutex_, std::try_to_lock);
    if (!lock) return;  // the thread that has it executes the first call
    for (size_t passed = 0;;) {
      std::shared_ptr<QueuedCall> call;
      {
        std::lock_guard<std::mutex> queue_lock(mutex_);
        if (passed == queue_.size()) break;
        call = queue_[passed];
      }
      const Progress progress = call->advance();
      if (progress == Progress::waiting) break;
      if (progress == Progress::passed) {
        ++passed;
        continue;
      }
      std::lock_guard<std::mutex> queue_lock(mutex_);
      queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(passed));
      executed.push_back(std::move(call));
    }
  }
  for (const auto& call : executed)
    if (call->complete()) call->run_callbacks();
}

std::shared_ptr<QueuedCall> CallQueue::pop() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (queue_.empty()) return nullptr;
  auto call = std::move(queue_.front());
  queue_.pop_front();
  return call;
}

// In slices: the thread that holds the lock may be waiting for other ranks, and a plain lock
// would keep Ctrl-C out for as long.
std::unique_lock<std::timed_mutex> CallQueue::lock_execution() {
#if defined(__SANITIZE_THREAD__)
  using Time = std::chrono::system_clock;  // ThreadSanitizer does not support the steady clock here
#else
  using Time = Clock;
#endif
  std::unique_lock<std::timed_mutex> lock(execution_mutex_, std::try_to_lock);
  SleepScope scope;
  while (!lock && !lock.try_lock_until(Time::now() + kSleepSlice)) {
    scope.begin();
    poll_signals();
  }
  return lock;
}

void CallQueue::run(QueuedCall& call) {
  while (true) {
    std::shared_ptr<QueuedCall> earlier;
    {
      const auto lock = lock_execution();
      earlier = pop();
      (earlier ? *earlier : call).execute(false);
    }
    QueuedCall& executed = earlier ? *earlier : call;
    if (executed.complete()) executed.run_callbacks();
    if (!earlier) return;
  }
}

void CallQueue::help_until_executed(QueuedCall& call) {
  while (!call.is_executed()) {
    std::shared_ptr<QueuedCall> next;
    {
      const auto lock = lock_execution();
      if (call.is_executed()) return;
      next = pop();
      if (!next) return;  // it was executed in the meantime
      next->execute(false);
    }
    if (next->complete()) next->run_callbacks();
  }
}

void CallQueue::complete_in_thread(QueuedCall& call) {
  if (!call.complete()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++threads_in_callbacks_;
    if (running_threads_ == threads_in_callbacks_ && !queue_.empty()) start_thread();
  }
  call.run_callbacks();
  std::lock_guard<std::mutex> lock(mutex_);
  --threads_in_callbacks_;
}

void CallQueue::run_thread() {
  pthread_setname_np(pthread_self(), "lockstep-queue");
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        --running_threads_;
        return;
      }
    }
    std::shared_ptr<QueuedCall> call;
    {
      std::lock_guard<std::timed_mutex> lock(execution_mutex_);
      call = pop();
      if (call) call->execute(true);
    }
    if (call) complete_in_thread(*call);
  }
}

}  // namespace lockstep
