// The queue of a group's calls: their order, the threads that run them, callbacks that make calls.
#include <atomic>
#include <condition_variable>
#include <mutex>

#include "call_queue.h"
#include "check.h"

using lockstep::CallQueue;
using lockstep::Progress;
using lockstep::QueuedCall;

namespace {

// A call that records when it was executed, with a callback of the test's choice.
class RecordedCall : public QueuedCall {
 public:
  RecordedCall(std::vector<int>& order, int number, std::function<void()> callback = nullptr)
      : order_(order), number_(number), callback_(std::move(callback)) {}

  void execute(bool is_background) override {
    order_.push_back(number_);  // under the execution lock
    ran_in_background = is_background;
  }
  bool is_executed() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }
  bool complete() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      completed_ = true;
    }
    changed_.notify_all();
    return callback_ != nullptr;
  }
  void run_callbacks() override { callback_(); }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, kTestTimeout, [this] { return completed_; }));
  }

  bool ran_in_background = false;

 private:
  std::vector<int>& order_;
  const int number_;
  const std::function<void()> callback_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool completed_ = false;
};

std::vector<int> first_numbers(int n) {
  std::vector<int> numbers;
  for (int i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

}  // namespace

TEST(queued_calls_run_once_each_in_the_order_they_were_made) {
  std::vector<int> order;
  std::vector<std::shared_ptr<RecordedCall>> calls;
  {
    CallQueue queue;
    for (int i = 0; i < 1000; ++i) {
      calls.push_back(std::make_shared<RecordedCall>(order, i));
      queue.add(calls.back());
    }
    for (auto& call : calls) call->wait();
  }
  CHECK(order == first_numbers(1000));
  CHECK(calls[0]->ran_in_background);
}

TEST(stop_executes_queued_calls) {
  std::vector<int> order;
  CallQueue queue;
  for (int i = 0; i < 100; ++i) queue.add(std::make_shared<RecordedCall>(order, i));
  queue.stop();
  CHECK(order == first_numbers(100));
}

// A call that takes its steps as the test allows.
class SteppedCall : public RecordedCall {
 public:
  using RecordedCall::RecordedCall;
  Progress advance() override {
    ++steps;
    if (allowed == Progress::executed) execute(false);
    return allowed;
  }
  Progress allowed = Progress::waiting;
  int steps = 0;
};

TEST(calls_advance_in_order_without_waiting) {
  std::vector<int> order;
  CallQueue queue;
  std::vector<std::shared_ptr<SteppedCall>> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(std::make_shared<SteppedCall>(order, i));
    queue.add(calls.back(), false);
  }
  queue.advance();
  CHECK(calls[0]->steps == 1 && calls[1]->steps == 0);  // the second one must not begin
  calls[0]->allowed = Progress::passed;
  queue.advance();
  CHECK(calls[0]->steps == 2 && calls[1]->steps == 1 && calls[2]->steps == 0);
  calls[0]->allowed = calls[1]->allowed = Progress::executed;
  queue.advance();
  CHECK(order == first_numbers(2) && calls[1]->is_executed() && calls[2]->steps == 1);
  RecordedCall last(order, 3);
  queue.run(last);  // executes what is left of the third one
  CHECK(order == first_numbers(4) && !calls[2]->ran_in_background);
}

TEST(a_call_that_wakes_no_thread_is_executed_by_who_waits_for_it_or_at_the_end) {
  std::vector<int> order;
  CallQueue queue;
  const auto first = std::make_shared<RecordedCall>(order, 0);
  queue.add(first, false);
  queue.advance();  // has no steps
  queue.help_until_executed(*first);
  CHECK(first->is_executed() && !first->ran_in_background);
  const auto second = std::make_shared<RecordedCall>(order, 1);
  queue.add(second, false);
  queue.stop();
  CHECK(order == first_numbers(2));
}

TEST(a_synchronous_call_runs_after_the_calls_queued_before_it) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<int> order;
    CallQueue queue;
    for (int i = 0; i < 5; ++i) queue.add(std::make_shared<RecordedCall>(order, i));
    RecordedCall last(order, 5);
    queue.run(last);
    queue.stop();
    CHECK(order == first_numbers(6));
    CHECK(!last.ran_in_background);
  }
}

TEST(several_threads_may_wait_for_calls_and_execute_them) {
  std::vector<int> order;
  CallQueue queue;
  std::vector<std::shared_ptr<RecordedCall>> calls;
  for (int i = 0; i < 400; ++i) calls.push_back(std::make_shared<RecordedCall>(order, i));
  std::atomic<int> added{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (auto& call : calls) {
      queue.add(call);
      ++added;
    }
  });
  for (int helper = 0; helper < 3; ++helper)
    threads.emplace_back([&] {
      for (int i = 0; i < 400; ++i) {
        while (added <= i) std::this_thread::yield();
        queue.help_until_executed(*calls[static_cast<size_t>(i)]);
        calls[static_cast<size_t>(i)]->wait();
      }
    });
  for (auto& thread : threads) thread.join();
  queue.stop();
  CHECK(order == first_numbers(400));
}

TEST(a_callback_may_wait_for_a_call_that_it_queues) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    std::vector<int> order;
    CallQueue queue;
    // Each callback queues the next call and waits for it without executing it, four levels deep.
    std::function<void(int)> below = [&](int number) {
      if (number == 4) return;
      auto next = std::make_shared<RecordedCall>(order, number, [&, number] { below(number + 1); });
      queue.add(next);
      next->wait();
    };
    below(0);
    queue.stop();
    CHECK(order == first_numbers(4));
  }
}
