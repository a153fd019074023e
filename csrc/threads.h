// The threads of one object, which end with it.
#pragma once

#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep {

class Threads {
 public:
  // Both under the lock of the object.
  void start(std::function<void()> body);
  // Waits for all, also for those that one of them yet starts; unlocks meanwhile.
  void join(std::unique_lock<std::mutex>& lock);

 private:
  std::vector<std::thread> threads_;
};

}  // namespace lockstep
