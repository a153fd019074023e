// The collective calls of a group, one after the other, in the order they were made.
//
// A call that is waited for at once runs in its caller. Others are queued; a
// thread of the group takes them, or whoever waits for one of them first: then no
// other thread need be woken. The thread starts with the first queued call and
// sleeps when there is none.
//
// What waits for a call's future may be a callback that makes further calls and waits
// for them (torch's PowerSGD does). So a call is concluded outside its turn, and while
// all threads are busy with that, another one is started for what is queued.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "threads.h"

namespace lockstep {

class Job {
 public:
  virtual ~Job() = default;
  virtual void execute(bool background) = 0;  // in its turn; must not throw
  virtual bool over() = 0;                    // has it been executed?
  virtual bool settle() = 0;                  // after its turn: wake who waits; are there callbacks to run?
  virtual void announce() = 0;                // run them
};

class Queue {
 public:
  // Who waits for its turn calls `hear` now and then, which may throw.
  explicit Queue(std::function<void()> hear = [] {});
  ~Queue();
  void hear() { hear_(); }
  void add(std::shared_ptr<Job> job);
  // Runs what was queued before, then the job, in this thread.
  void run(Job& job);
  // Returns when a queued job is over; runs it here unless a thread does already.
  void help(Job& job);
  void stop();  // finishes what is queued

 private:
  std::unique_lock<std::timed_mutex> turn();
  void loop();
  void conclude(Job& job);  // in a thread of ours
  void start_thread();
  std::shared_ptr<Job> next();

  std::mutex list_;  // guards all below
  std::timed_mutex turn_;  // held by whoever runs a job
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  Threads threads_;
  size_t running_ = 0;     // threads that have not ended
  size_t concluding_ = 0;  // of those, the ones that may be in a callback
  const std::function<void()> hear_;
};

}  // namespace lockstep
