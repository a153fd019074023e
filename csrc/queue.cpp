#include "queue.h"

#include <pthread.h>

#include "sync.h"

namespace lockstep {

Queue::Queue(std::function<void()> hear) : hear_(std::move(hear)) {}

Queue::~Queue() { stop(); }

void Queue::stop() {
  std::unique_lock<std::mutex> lock(list_);
  stopping_ = true;
  changed_.notify_all();
  threads_.join(lock);
}

void Queue::start_thread() {
  threads_.start([this] { loop(); });
  ++running_;
}

void Queue::add(std::shared_ptr<Job> job) {
  std::lock_guard<std::mutex> lock(list_);
  jobs_.push_back(std::move(job));
  if (running_ == concluding_) start_thread();
  changed_.notify_one();
}

std::shared_ptr<Job> Queue::next() {
  std::lock_guard<std::mutex> lock(list_);
  if (jobs_.empty()) return nullptr;
  auto job = std::move(jobs_.front());
  jobs_.pop_front();
  return job;
}

std::unique_lock<std::timed_mutex> Queue::turn() {
#if defined(__SANITIZE_THREAD__)
  using Time = std::chrono::system_clock;  // the sanitizer does not follow the steady form
#else
  using Time = Clock;
#endif
  std::unique_lock<std::timed_mutex> held(turn_, std::try_to_lock);
  while (!held && !held.try_lock_until(Time::now() + kSlice)) hear();
  return held;
}

void Queue::run(Job& job) {
  while (true) {
    std::shared_ptr<Job> earlier;
    {
      const auto held = turn();
      earlier = next();
      (earlier ? *earlier : job).execute(false);
    }
    Job& executed = earlier ? *earlier : job;
    if (executed.settle()) executed.announce();
    if (!earlier) return;
  }
}

void Queue::help(Job& job) {
  while (!job.over()) {
    std::shared_ptr<Job> first;
    {
      const auto held = turn();
      if (job.over()) return;
      first = next();
      if (!first) return;  // it was over between the two looks
      first->execute(false);
    }
    if (first->settle()) first->announce();
  }
}

void Queue::conclude(Job& job) {
  if (!job.settle()) return;
  {
    std::lock_guard<std::mutex> lock(list_);
    ++concluding_;
    if (running_ == concluding_ && !jobs_.empty()) start_thread();
  }
  job.announce();
  std::lock_guard<std::mutex> lock(list_);
  --concluding_;
}

void Queue::loop() {
  pthread_setname_np(pthread_self(), "lockstep-queue");
  while (true) {
    {
      std::unique_lock<std::mutex> lock(list_);
      changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        --running_;
        return;
      }
    }
    std::shared_ptr<Job> job;
    {
      std::lock_guard<std::timed_mutex> held(turn_);
      job = next();
      if (job) job->execute(true);
    }
    if (job) conclude(*job);
  }
}

}  // namespace lockstep
