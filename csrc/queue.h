// The collective calls of a group, one after the other, in the order they were made.
//
// A call that is waited for at once runs in its caller. Others are queued; a
// thread of the group takes them, or whoever waits for one of them first: then no
// other thread need be woken. The thread starts with the first queued call and
// sleeps when there is none.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace lockstep {

class Job {
 public:
  virtual ~Job() = default;
  virtual void execute(bool background) = 0;  // must not throw
  virtual bool over() = 0;
};

class Queue {
 public:
  Queue();
  ~Queue();
  void add(std::shared_ptr<Job> job);
  // Runs what was queued before, then the job, in this thread.
  void run(Job& job);
  // Returns when a queued job is over; runs it here unless the thread does already.
  void help(Job& job);
  void stop();  // finishes what is queued

 private:
  void loop();
  std::shared_ptr<Job> next();

  std::mutex list_;  // guards jobs_, stopping_
  std::mutex turn_;  // held by whoever runs a job
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
  int owner_;
};

}  // namespace lockstep
