// The threads of one object, which end with it.
//
// A forked child has the object but not its threads: there is nothing to wait for there.
#pragma once

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

class Threads {
 public:
  Threads();
  // Both under the lock of the object.
  void start(std::function<void()> body);
  // Waits for all, also for those that one of them yet starts; unlocks meanwhile.
  void join(std::unique_lock<std::mutex>& lock);
  // Lets go of what is not there; whether this is a forked child.
  bool left_behind();

 private:
  std::vector<std::thread> threads_;
  int owner_;
};

}  // namespace lockstep
