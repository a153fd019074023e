#include "threads.h"

#include <pthread.h>

#include <utility>

namespace lockstep {

void ThreadGroup::start(std::function<void()> body) { threads_.emplace_back(std::move(body)); }

void ThreadGroup::join(std::unique_lock<std::mutex>& lock) {
  while (!threads_.empty()) {
    std::thread thread = std::move(threads_.back());
    threads_.pop_back();
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

void CallbackPool::submit(std::function<void()> callback) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.push_back(std::move(callback));
  if (idle_threads_ < pending_.size()) {
    threads_.start([this] { run_thread(); });
    ++idle_threads_;
  }
  changed_.notify_one();
}

void CallbackPool::run_thread() {
  pthread_setname_np(pthread_self(), "lockstep-callbk");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
    if (pending_.empty()) return;
    auto callback = std::move(pending_.front());
    pending_.pop_front();
    --idle_threads_;
    lock.unlock();
    callback();
    callback = nullptr;  // destroying what it captures may need the interpreter's lock
    lock.lock();
    ++idle_threads_;
  }
}

void CallbackPool::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  threads_.join(lock);
}

}  // namespace lockstep
