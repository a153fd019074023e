#include "threads.h"

#include <unistd.h>

#include <utility>

namespace lockstep {

Threads::Threads() : owner_(getpid()) {}

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

bool Threads::left_behind() {
  if (owner_ == getpid()) return false;
  for (std::thread& thread : threads_)
    if (thread.joinable()) thread.detach();
  return true;
}

}  // namespace lockstep
