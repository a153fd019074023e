// Messages: matching, waiting, listening, and what becomes of those that nobody takes.
#include <signal.h>
#include <sys/resource.h>

#include <cstring>

#include "failure.h"
#include "mail.h"
#include "ranks.h"

using namespace lockstep;

namespace {

// A message that somebody may listen to.
struct Listened : Message {
  bool settle() override { return callback != nullptr; }
  void announce() override { callback(); }
  std::function<void()> callback;
};

Post message(Op op, int peer, int tag, std::vector<char>& data) {
  auto post = std::make_shared<Listened>();
  post->op = op;
  post->peer = peer;
  post->tag = tag;
  post->data = data.data();
  post->bytes = post->count = data.size();
  post->timeout = kPatience;
  return post;
}

// Waits without a patience of its own; what is said if the message failed.
std::string waited(Mail& mail, const Post& post) {
  CHECK(mail.wait(post));
  CHECK(post->done);
  return post->error;
}

void listen(Mail& mail, const Post& post, std::function<void()> callback) {
  static_cast<Listened&>(*post).callback = std::move(callback);
  mail.listen(post);
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
      for (Post& post : posts) CHECK(waited(mail, post).empty());
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
    const std::string text = waited(mail, post);
    if (group.rank() == 1) CHECK(contains(text, "rank 0 sent 10 elements"));
    meet(group);
  });
}

TEST(waiting_for_a_message_of_a_dead_rank_ends) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = idle_rank_one(*group);
  Mail mail(*group);
  std::vector<char> data(4);
  Post post = message(Op::recv, 1, 0, data);
  mail.post(post);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  CHECK(contains(waited(mail, post), "rank 1 died"));
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  waitpid(child, nullptr, 0);
}

TEST(a_rank_in_a_collective_still_takes_its_messages) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(100000, static_cast<char>(group.rank()));
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    mail.post(post);
    if (group.rank() == 0) CHECK(waited(mail, post).empty());  // comes to the barrier only after that
    meet(group);
    CHECK(waited(mail, post).empty());
    CHECK(data[99999] == 0);
    meet(group);
  });
}


// ---- moved by others ----

TEST(a_thread_moves_messages_while_a_collective_sleeps) {
  setenv("LOCKSTEP_LANE_BYTES", "512", 1);
  setenv("LOCKSTEP_NO_READ", "1", 1);
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    group.meanwhile = nullptr;  // so that the collective itself moves nothing
    std::vector<char> data(100000, static_cast<char>(group.rank()));
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    mail.post(post);
    if (group.rank() == 0) CHECK(waited(mail, post).empty());
    CHECK(failure([&] { meet(group); }).empty());
    CHECK(waited(mail, post).empty());
    meet(group);
  });
  unsetenv("LOCKSTEP_LANE_BYTES");
  unsetenv("LOCKSTEP_NO_READ");
}

TEST(callbacks_run_in_no_callers_thread) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    for (int round = 0; round < 200; ++round) {
      std::vector<char> data(10), other(10);
      Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
      if (group.rank() == 0) {
        meet(group);
        mail.post(post);
        continue;
      }
      std::atomic<bool> called{false};
      const auto caller = std::this_thread::get_id();
      mail.post(post);
      listen(mail, post, [&] {
        CHECK(std::this_thread::get_id() != caller);
        called = true;
      });
      meet(group);
      while (!called) group.meanwhile();
    }
    meet(group);
  });
}

TEST(a_callback_may_wait_for_another_callback) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(10), other(10);
    Post first = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    Post last = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 2, other);
    std::atomic<bool> told{false}, over{false};
    if (group.rank() == 0) {
      meet(group);
      mail.post(first);
      mail.post(last);
    } else {
      mail.post(first);
      mail.post(last);
      listen(mail, last, [&] { told = true; });
      listen(mail, first, [&] {
        while (!told) yield_core();
        over = true;
      });
      meet(group);
      while (!over) yield_core();
    }
    meet(group);
  });
}

// ---- that do not come, or not in time ----

TEST(time_runs_from_when_somebody_waits) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(10);
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    post->timeout = std::chrono::milliseconds(300);
    if (group.rank() == 1) {
      mail.post(post);
      const auto begun = Clock::now();
      while (Clock::now() - begun < post->timeout * 2) yield_core();  // it computes
      CHECK(!mail.wait(post, std::chrono::milliseconds(50)));
      CHECK(!group.aborted());
    }
    meet(group);
    if (group.rank() == 0) mail.post(post);
    CHECK(waited(mail, post).empty());
    meet(group);
  });
}

TEST(a_message_that_does_not_come_is_described_at_the_deadline) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(10);
    const bool first = group.rank() == 0;
    Post post = message(first ? Op::send : Op::recv, 1 - group.rank(), first ? 5 : 6, data);
    post->timeout = std::chrono::milliseconds(100);
    mail.post(post);
    meet(group);
    if (first) {
      while (!group.aborted()) yield_core();  // it is alive, and elsewhere
      return;
    }
    const std::string text = waited(mail, post);
    CHECK(contains(text, "rank 1: recv from rank 0 (tag 6) on group default failed: rank 1 waited"));
    CHECK(contains(text, "for rank 0, last seen at #1 barrier"));
    CHECK(contains(text, "a message with tag 5 came from it and nobody asked for it"));
  });
}

TEST(a_deadline_says_what_the_other_rank_waits_for) {
  for (const bool collective : {false, true})
    on_ranks(2, [&](Group& group) {
      Mail mail(group);
      meet(group);
      std::vector<char> data(10);
      const bool first = group.rank() == 0;
      Post post = message(Op::recv, 1 - group.rank(), first ? 1 : 2, data);
      if (!first) {
        if (collective) {
          CHECK(contains(failure([&] { meet(group); }), "rank 0 waited"));
        } else {
          mail.post(post);
          CHECK(contains(waited(mail, post), "rank 0 waited"));
        }
        return;
      }
      const std::string other = collective ? "barrier #2" : "recv from rank 0 (tag 2)";
      const auto until = Clock::now() + kPatience;
      while (!contains(group.whereabouts(1), "now waiting in " + other)) CHECK(Clock::now() < until);
      post->timeout = std::chrono::milliseconds(50);
      mail.post(post);
      const std::string text = waited(mail, post);
      CHECK(contains(text, "in recv from rank 1 (tag 1) for rank 1, last seen at #"));
      CHECK(contains(text, ", now waiting in " + other));
    });
}

TEST(a_receive_from_anybody_ends_when_all_others_have_left) {
  on_ranks(3, [](Group& group) {
    Mail mail(group);
    meet(group);
    if (group.rank() != 0) {
      mail.stop();
      return group.leave();
    }
    std::vector<char> data(10);
    Post post = message(Op::recv, -1, 0, data);
    mail.post(post);
    CHECK(contains(waited(mail, post), "all other ranks have left the group"));
  });
}

TEST(what_nobody_took_is_taken_back_by_a_rank_that_leaves) {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(100000, static_cast<char>(7));
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    if (group.rank() == 0) {
      mail.post(post);
      meet(group);
      mail.stop();
      CHECK(contains(post->error, "failed: rank 0 left the group first"));
      std::memset(data.data(), 9, data.size());  // its memory is free for something else
      return group.leave();
    }
    meet(group);
    while (health(group.record(0)) != Health::left) yield_core();
    mail.post(post);
    CHECK(contains(waited(mail, post), "rank 0 has left the group"));
    for (char byte : data) CHECK(byte == 7);
  });
}

// ---- that are hard to reach ----

namespace {

// A group of two where rank 0 sends from shared memory that rank 1 cannot map.
void check_unmapped() {
  on_ranks(2, [](Group& group) {
    Mail mail(group);
    std::vector<char> data(100000, 1);
    Post post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    if (group.rank() == 0) {
      post->data = static_cast<char*>(Heap::here().allocate(post->bytes));
      std::memset(post->data, 3, post->bytes);
    }
    meet(group);
    rlimit before{}, none{};
    if (group.rank() == 1) {
      CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
      none.rlim_max = before.rlim_max;
      CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);  // no descriptor is free
    }
    mail.post(post);
    CHECK(waited(mail, post).empty());
    if (group.rank() == 1) {
      CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
      for (char byte : data) CHECK(byte == 3);
    } else {
      Heap::here().free(post->data);
    }
    meet(group);
  });
}

}  // namespace

TEST(a_region_that_cannot_be_mapped_is_read_otherwise) {
  check_unmapped();
  setenv("LOCKSTEP_NO_READ", "1", 1);
  check_unmapped();
  unsetenv("LOCKSTEP_NO_READ");
}

TEST(a_rank_that_died_before_its_region_was_mapped_is_named) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = rank_one(group->segment()->address(), [](Group& other) {
    Mail mail(other);
    std::vector<char> unused(100000);
    Post post = message(Op::send, 0, 1, unused);
    post->data = static_cast<char*>(Heap::here().allocate(post->bytes));
    mail.post(post);
    meet(other);
    raise(SIGKILL);
  });
  meet(*group);
  waitpid(child, nullptr, 0);
  Mail mail(*group);
  std::vector<char> data(100000);
  Post post = message(Op::recv, 1, 1, data);
  mail.post(post);
  const std::string text = waited(mail, post);
  CHECK(contains(text, "rank 0: recv from rank 1 (tag 1) on group default failed: rank 1 died"));
}
