// Death, silence, leaving: what happens when a rank does not come.
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "check.h"
#include "collectives/barrier.h"
#include "failure.h"
#include "mail.h"

using namespace lockstep;

namespace {

Call barrier_call() {
  Call call;
  call.op = Op::barrier;
  return call;
}

void meet(Group& group, std::chrono::milliseconds timeout = kPatience) {
  Turn turn(group, barrier_call(), timeout, false);
  barrier(turn);
}

// Forks a process that is rank 1 of a group of two, runs `body` there and exits.
pid_t rank_one(const Address& address, const std::function<void(Group&)>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  auto group = Group::attach(1, 2, address, {});
  body(*group);
  _exit(0);
}

}  // namespace

TEST(a_killed_rank_is_noticed_within_a_second) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = rank_one(group->segment()->address(), [](Group& other) {
    meet(other);
    pause();
  });
  meet(*group);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  const std::string text = failure([&] { meet(*group); });
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  CHECK(contains(text, "rank 1 died"));
  CHECK(contains(text, "barrier #2"));
  waitpid(child, nullptr, 0);
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

// ---- messages ----

namespace {

Post message(Op op, int peer, int tag, std::vector<char>& data) {
  auto post = std::make_shared<Message>();
  post->op = op;
  post->peer = peer;
  post->tag = tag;
  post->data = data.data();
  post->bytes = post->count = data.size();
  post->timeout = kPatience;
  return post;
}

void check_messages(int n) {
  on_ranks(n, [n](Group& group) {
    Mail mail(group);
    const int me = group.rank();
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<char>> out, in;
      std::vector<Post> posts;
      std::vector<std::pair<int, size_t>> which;
      const size_t sizes[] = {0, 1, 100, 256, 257, 5000, 70000};
      out.reserve(100);
      in.reserve(100);
      // Tags backwards on one side, so that every message comes unexpected once.
      for (int peer = 0; peer < n; ++peer)
        for (int tag = 0; tag < 7; ++tag) {
          out.emplace_back(sizes[tag], static_cast<char>(me * 16 + tag + round));
          posts.push_back(message(Op::send, peer, tag, out.back()));
          mail.post(posts.back());
        }
      for (int peer = 0; peer < n; ++peer)
        for (int tag = 6; tag >= 0; --tag) {
          in.emplace_back(sizes[tag], 99);
          posts.push_back(message(Op::recv, peer, tag, in.back()));
          mail.post(posts.back());
          which.emplace_back(peer, static_cast<size_t>(tag));
        }
      for (Post& post : posts) mail.wait(post, kPatience);
      for (size_t i = 0; i < in.size(); ++i)
        for (char byte : in[i])
          CHECK(byte == static_cast<char>(which[i].first * 16 + static_cast<int>(which[i].second) + round));
    }
    meet(group);
  });
}

}  // namespace

TEST(messages_arrive_read_from_memory) {
  setenv("LOCKSTEP_CELL_BYTES", "256", 1);
  for (int n : {1, 2, 3}) check_messages(n);
  unsetenv("LOCKSTEP_CELL_BYTES");
}

TEST(messages_arrive_through_lanes) {
  setenv("LOCKSTEP_CELL_BYTES", "256", 1);
  setenv("LOCKSTEP_LANE_BYTES", "512", 1);
  setenv("LOCKSTEP_NO_READ", "1", 1);
  for (int n : {1, 2, 3}) check_messages(n);
  unsetenv("LOCKSTEP_CELL_BYTES");
  unsetenv("LOCKSTEP_LANE_BYTES");
  unsetenv("LOCKSTEP_NO_READ");
}

TEST(a_message_of_another_size_is_refused) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(group.rank() == 0 ? 10 : 11);
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 3, data);
    mail.post(post);
    const std::string text = failure([&] { mail.wait(post, kPatience); });
    if (group.rank() == 1) CHECK(contains(text, "rank 0 sent 10 elements"));
    meet(group);
  });
}

TEST(waiting_for_a_message_of_a_dead_rank_ends) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = rank_one(group->segment()->address(), [](Group& other) {
    meet(other);
    pause();
  });
  meet(*group);
  Mail mail(*group);
  std::vector<char> data(4);
  Post post = message(Op::recv, 1, 0, data);
  mail.post(post);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  CHECK(contains(failure([&] { mail.wait(post, kPatience); }), "rank 1 died"));
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  waitpid(child, nullptr, 0);
}

TEST(a_rank_in_a_collective_still_takes_its_messages) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(100000, static_cast<char>(group.rank()));
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    mail.post(post);
    if (group.rank() == 0) mail.wait(post, kPatience);  // comes to the barrier only after that
    meet(group);
    mail.wait(post, kPatience);
    CHECK(data[99999] == 0);
    meet(group);
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
