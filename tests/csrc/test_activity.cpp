// What a process publishes for its launcher.
#include "activity.h"

#include <cstring>
#include <thread>

#include "ranks.h"

using namespace lockstep;

// The page of this process during a test.
struct Page {
  alignas(64) char bytes[kActivityPageBytes] = {};
  Page() { set_activity_page(reinterpret_cast<uint64_t>(bytes)); }
  // Later tests publish to a page that nobody reads.
  ~Page() {
    alignas(64) static char unread[kActivityPageBytes];
    set_activity_page(reinterpret_cast<uint64_t>(unread));
  }
  const LastCall& call() const { return *reinterpret_cast<const LastCall*>(bytes + 2048); }
  const CurrentWait& wait() const { return *reinterpret_cast<const CurrentWait*>(bytes + 2304); }
};

TEST(a_call_is_published_when_it_begins) {
  Page page;
  publish_call("all_reduce", -1, 7, 12, "default", Clock::time_point(std::chrono::nanoseconds(5)));
  CHECK(page.call().sequence % 2 == 0 && page.call().sequence > 0);
  CHECK(page.call().number == 7 && page.call().count == 12 && page.call().begun_ns == 5);
  CHECK(std::string(page.call().op) == "all_reduce" && std::string(page.call().group) == "default");
  publish_call("recv", 3, 0, 1, std::string(100, 'g'), Clock::now());
  CHECK(page.call().peer == 3 && std::string(page.call().group) == std::string(47, 'g'));
}

TEST(the_wait_of_the_main_thread_counts_and_else_the_oldest) {
  Page page;
  const auto since = [](int at) { return Clock::time_point(std::chrono::nanoseconds(at)); };
  std::atomic<int> step{0};
  std::thread background([&] {
    begin_wait("barrier, call 2", since(10));
    step = 1;
    while (step != 2) yield_core();
    end_wait();
  });
  while (step != 1) yield_core();
  CHECK(std::string(page.wait().text) == "barrier, call 2");
  CHECK(page.wait().since_ns == 10 && page.wait().in_main_thread == 0);
  begin_wait("", since(20));  // for the other thread
  CHECK(std::string(page.wait().text) == "barrier, call 2");
  CHECK(page.wait().since_ns == 20 && page.wait().in_main_thread == 1);
  CHECK(page.wait().awaited == kNotSaid);
  begin_wait("recv from rank 1", since(30), 1, CallKind::receive);
  CHECK(std::string(page.wait().text) == "recv from rank 1" && page.wait().since_ns == 30);
  CHECK(page.wait().awaited == 1 && page.wait().kind == CallKind::receive);
  end_wait();
  end_wait();
  CHECK(page.wait().since_ns == 10 && page.wait().in_main_thread == 0);
  step = 2;
  background.join();
  CHECK(page.wait().since_ns == 0 && page.wait().sequence % 2 == 0);
}

TEST(a_rank_that_sleeps_in_a_collective_publishes_that) {
  Page page;
  on_ranks(2, [&](Group& group) {
    if (group.rank() == 1) {
      while (group.rank_state(1).phase.sleepers.load() == 0) yield_core();
      CHECK(std::string(page.wait().text) == "barrier, call 1 of group default");
      CHECK(page.wait().since_ns > 0 && page.wait().kind == CallKind::collective);
    }
    run_barrier(group);
  });
  CHECK(std::string(page.call().op) == "barrier" && page.call().number == 1);
  CHECK(page.wait().since_ns == 0);
}

TEST(a_forked_child_publishes_nothing_to_its_parents_page) {
  if (!kMayFork) return;
  Page page;
  publish_call("barrier", -1, 1, 0, "default", Clock::now());
  const uint32_t before = page.call().sequence;
  const pid_t child = fork();
  if (child == 0) {
    publish_call("barrier", -1, 2, 0, "default", Clock::now());
    _exit(page.call().sequence == before ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
