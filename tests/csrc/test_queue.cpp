// The queue of a group's calls: their order, who runs them, callbacks that make calls.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "check.h"
#include "queue.h"

using lockstep::Job;
using lockstep::Queue;

namespace {

// A call that notes when it was executed, and whose callback does what the test says.
class Noted : public Job {
 public:
  Noted(std::vector<int>& order, int number, std::function<void()> callback = nullptr)
      : order_(order), number_(number), callback_(std::move(callback)) {}

  void execute(bool background) override {
    order_.push_back(number_);  // one turn at a time: no lock is needed
    in_background = background;
  }
  bool over() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return settled_;
  }
  bool settle() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      settled_ = true;
    }
    changed_.notify_all();
    return callback_ != nullptr;
  }
  void announce() override { callback_(); }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kPatience, [this] { return settled_; }));
  }

  bool in_background = false;

 private:
  std::vector<int>& order_;
  const int number_;
  const std::function<void()> callback_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool settled_ = false;
};

std::vector<int> counted(int n) {
  std::vector<int> numbers;
  for (int i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

}  // namespace

TEST(queued_calls_run_once_each_in_the_order_they_were_made) {
  std::vector<int> order;
  std::vector<std::shared_ptr<Noted>> jobs;
  {
    Queue queue;
    for (int i = 0; i < 1000; ++i) {
      jobs.push_back(std::make_shared<Noted>(order, i));
      queue.add(jobs.back());
    }
    for (auto& job : jobs) job->wait();
  }
  CHECK(order == counted(1000));
  CHECK(jobs[0]->in_background);
}

TEST(stopping_finishes_what_is_queued) {
  std::vector<int> order;
  Queue queue;
  for (int i = 0; i < 100; ++i) queue.add(std::make_shared<Noted>(order, i));
  queue.stop();
  CHECK(order == counted(100));
}

TEST(a_call_that_is_waited_for_runs_after_those_queued_before_it) {
  for (int turn = 0; turn < 200; ++turn) {
    std::vector<int> order;
    Queue queue;
    for (int i = 0; i < 5; ++i) queue.add(std::make_shared<Noted>(order, i));
    Noted last(order, 5);
    queue.run(last);
    queue.stop();
    CHECK(order == counted(6));
    CHECK(!last.in_background);
  }
}

TEST(several_threads_may_wait_for_calls_and_help) {
  std::vector<int> order;
  Queue queue;
  std::vector<std::shared_ptr<Noted>> jobs;
  for (int i = 0; i < 400; ++i) jobs.push_back(std::make_shared<Noted>(order, i));
  std::atomic<int> added{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (auto& job : jobs) {
      queue.add(job);
      ++added;
    }
  });
  for (int helper = 0; helper < 3; ++helper)
    threads.emplace_back([&] {
      for (int i = 0; i < 400; ++i) {
        while (added <= i) std::this_thread::yield();
        queue.help(*jobs[static_cast<size_t>(i)]);
        jobs[static_cast<size_t>(i)]->wait();
      }
    });
  for (auto& thread : threads) thread.join();
  queue.stop();
  CHECK(order == counted(400));
}

TEST(a_callback_may_wait_for_a_call_that_it_queues) {
  for (int turn = 0; turn < 100; ++turn) {
    std::vector<int> order;
    Queue queue;
    // Each callback queues the next call and waits for it without helping, four deep.
    std::function<void(int)> below = [&](int number) {
      if (number == 4) return;
      auto next = std::make_shared<Noted>(order, number, [&, number] { below(number + 1); });
      queue.add(next);
      next->wait();
    };
    below(0);
    queue.stop();
    CHECK(order == counted(4));
  }
}
