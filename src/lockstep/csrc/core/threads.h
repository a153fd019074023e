// Threads that belong to one object, and a pool of them that runs users' callbacks.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

// The owner guards it with a mutex of its own and joins before it is destroyed.
class ThreadGroup {
 public:
  void start(std::function<void()> body);
  // Waits for all threads, including those that a running thread still starts. `lock`
  // holds the owner's mutex; it is released while waiting.
  void join(std::unique_lock<std::mutex>& lock);

 private:
  std::vector<std::thread> threads_;
};

// Runs the callbacks that users attach to messages, never in the thread of a caller.
//
// A callback may do anything: make collective calls, wait for other messages, wait for
// another callback. So it runs with no lock held and outside any call of the group, and
// it never queues behind a callback that is still running: if all threads are busy,
// another one is started. Callbacks begin in the order in which they were submitted.
class CallbackPool {
 public:
  ~CallbackPool() { stop(); }
  void submit(std::function<void()> callback);
  void stop();  // after all submitted callbacks have run

 private:
  void run_thread();

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::deque<std::function<void()>> pending_;
  ThreadGroup threads_;
  size_t idle_threads_ = 0;
  bool stopping_ = false;
};

}  // namespace lockstep
