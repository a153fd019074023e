#include "callbacks.h"

#include <pthread.h>

#include <utility>

namespace lockstep {

void Callbacks::run(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(mutex_);
  handed_.push_back(std::move(callback));
  if (free_ < handed_.size()) {
    threads_.start([this] { loop(); });
    ++free_;
  }
  changed_.notify_one();
}

void Callbacks::loop() {
  pthread_setname_np(pthread_self(), "lockstep-callbk");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !handed_.empty(); });
    if (handed_.empty()) return;
    auto callback = std::move(handed_.front());
    handed_.pop_front();
    --free_;
    lock.unlock();
    callback();
    callback = nullptr;  // what it holds may need the interpreter's lock to go
    lock.lock();
    ++free_;
  }
}

void Callbacks::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  threads_.join(lock);
}

}  // namespace lockstep
