#include "threads.h"

#include <utility>

namespace lockstep {

void Threads::start(std::function<void()> body) { threads_.emplace_back(std::move(body)); }

void Threads::join(std::unique_lock<std::mutex>& lock) {
  while (!threads_.empty()) {
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

}  // namespace lockstep
