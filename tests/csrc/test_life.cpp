// Death, silence, leaving: what happens when a rank does not come.
#include <sched.h>
#include <signal.h>

#include <cstring>

#include "failure.h"
#include "process.h"
#include "ranks.h"

using namespace lockstep;

TEST(a_killed_rank_is_noticed_within_a_second) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = idle_rank_one(*group);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  const std::string text = failure([&] { meet(*group); });
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  CHECK(contains(text, "rank 1 died"));
  CHECK(contains(text, "barrier #2"));
  waitpid(child, nullptr, 0);
}

TEST(a_forked_child_is_another_process) {
  if (!kMayFork) return;
  CHECK(this_process() == getpid());
  const pid_t child = fork();
  if (child == 0) _exit(this_process() == getpid() ? 0 : 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(this_process() == getpid());
}

TEST(a_rank_that_left_is_named) {
  on_ranks(2, [](Group& group) {
    meet(group);
    if (group.rank() == 1) return group.leave();
    CHECK(contains(failure([&] { meet(group); }), "rank 1 has left the group"));
  });
}

TEST(a_rank_that_is_there_already_is_refused_and_everybody_learns_it) {
  auto group = Group::create(2, {});
  auto other = Group::attach(1, 2, group->segment(), {});
  const std::string text = failure([&] { Group::attach(1, 2, group->segment(), {}); });
  CHECK(contains(text, "rank 1 is twice in group default, as process"));
  CHECK(group->aborted() && other->reason() == text);
}

TEST(a_rank_that_does_not_come_is_named_at_the_deadline) {
  on_ranks(3, [](Group& group) {
    meet(group);
    if (group.rank() == 2) {
      while (!group.aborted()) yield_core();  // it is alive, and elsewhere
      return;
    }
    const auto begun = Clock::now();
    const std::string text = failure([&] { meet(group, std::chrono::milliseconds(200)); });
    CHECK(Clock::now() - begun < std::chrono::seconds(5));
    CHECK(contains(text, "(limit 0.2 s) in barrier #2 for rank 2, last seen at #1 barrier"));
  });
}

TEST(ranks_on_cores_of_their_own_are_not_crowded) {
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
      // Everybody looks at the cores again, then once more with the others' news.
      for (int again = 0; again < 2; ++again) {
        for (int call = 0; call < 64; ++call) group.crowded();
        meet(group);
      }
      CHECK(group.crowded() == (!apart || cores.size() == 1));
    });
}
