// Runs what users hang on a message: in threads of its own, never in a caller's.
//
// A callback may do anything: make collective calls, wait for other messages, wait for
// another callback. So it runs with no lock held and outside any call of the group, and
// each one that is handed in has a thread that is free for it: another is started where
// all are busy. They begin in the order in which they were handed in.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "threads.h"

namespace lockstep {

class Callbacks {
 public:
  ~Callbacks() { stop(); }
  void run(std::function<void()> callback);
  void stop();  // once all have run

 private:
  void loop();

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::function<void()>> handed_;
  Threads threads_;
  size_t free_ = 0;  // threads that are in no callback
  bool stopping_ = false;
};

}  // namespace lockstep
