#include "queue.h"

#include <pthread.h>
#include <unistd.h>

namespace lockstep {

Queue::Queue() : owner_(getpid()) {}

Queue::~Queue() { stop(); }

void Queue::stop() {
  if (owner_ != getpid()) {
    // A forked child has this object but not the thread.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(list_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Queue::add(std::shared_ptr<Job> job) {
  std::lock_guard<std::mutex> lock(list_);
  jobs_.push_back(std::move(job));
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_one();
}

std::shared_ptr<Job> Queue::next() {
  std::lock_guard<std::mutex> lock(list_);
  if (jobs_.empty()) return nullptr;
  auto job = std::move(jobs_.front());
  jobs_.pop_front();
  return job;
}

void Queue::run(Job& job) {
  std::lock_guard<std::mutex> turn(turn_);
  while (auto earlier = next()) earlier->execute(false);
  job.execute(false);
}

void Queue::help(Job& job) {
  while (!job.over()) {
    std::lock_guard<std::mutex> turn(turn_);
    if (job.over()) return;
    auto first = next();
    if (!first) return;  // it was over between the two looks
    first->execute(false);
  }
}

void Queue::loop() {
  pthread_setname_np(pthread_self(), "lockstep-queue");
  while (true) {
    {
      std::unique_lock<std::mutex> lock(list_);
      changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
    }
    std::lock_guard<std::mutex> turn(turn_);
    if (auto job = next()) job->execute(true);
  }
}

}  // namespace lockstep
