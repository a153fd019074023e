// Ranks that die, hang or leave while others wait for them.
#include <sched.h>
#include <signal.h>

#include <cstring>

#include "errors.h"
#include "process.h"
#include "ranks.h"

using namespace lockstep;

TEST(a_killed_rank_is_detected_within_a_second) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = fork_idle_rank_one(*group);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  const std::string text = error_of([&] { run_barrier(*group); });
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  CHECK(contains(text, "rank 1 died"));
  CHECK(contains(text, "barrier #2"));
  CHECK(group->failure().loss == Loss::ended && group->failure().rank == 1);
  waitpid(child, nullptr, 0);
}

TEST(a_forked_child_has_its_own_pid) {
  if (!kMayFork) return;
  CHECK(current_pid() == getpid());
  const pid_t child = fork();
  if (child == 0) _exit(current_pid() == getpid() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(current_pid() == getpid());
}

TEST(a_rank_that_has_left_is_named) {
  on_ranks(2, [](Group& group) {
    run_barrier(group);
    if (group.rank() == 1) return group.leave();
    CHECK(contains(error_of([&] { run_barrier(group); }), "rank 1 has left the group"));
    CHECK(group.failure().loss == Loss::left && group.failure().rank == 1);
  });
}

TEST(a_rank_that_joins_twice_is_refused_on_every_rank) {
  auto group = Group::create(2, {});
  auto other = Group::attach(1, 2, group->segment(), {});
  const std::string text = error_of([&] { Group::attach(1, 2, group->segment(), {}); });
  CHECK(contains(text, "rank 1 joined group default twice, as process"));
  CHECK(group->is_aborted() && other->failure().reason == text);
}

TEST(a_rank_that_does_not_arrive_is_named_after_the_timeout) {
  on_ranks(3, [](Group& group) {
    run_barrier(group);
    if (group.rank() == 2) {
      while (!group.is_aborted()) yield_core();  // it is alive, but does not call
      return;
    }
    const auto begun = Clock::now();
    const std::string text = error_of([&] { run_barrier(group, std::chrono::milliseconds(200)); });
    CHECK(Clock::now() - begun < std::chrono::seconds(5));
    CHECK(
        contains(text, "with a timeout of 0.2 s in barrier #2, waiting for rank 2, last seen at"));
  });
}

TEST(ranks_on_separate_cores_are_not_oversubscribed) {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  for (const bool apart : {true, false})
    on_ranks(2, [&](Group& group) {
      const auto own = static_cast<size_t>(apart ? group.rank() : 0);
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cores[own % cores.size()], &one);
      CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
      // Every rank publishes its core mask again, then reads the new masks of the others.
      for (int again = 0; again < 2; ++again) {
        for (int repeat = 0; repeat < 64; ++repeat) group.is_oversubscribed();
        run_barrier(group);
      }
      CHECK(group.is_oversubscribed() == (!apart || cores.size() == 1));
    });
}
