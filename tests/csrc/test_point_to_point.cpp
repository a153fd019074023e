// Messages: matching, waiting, callbacks, and messages that are never received.
#include <signal.h>
#include <sys/resource.h>

#include <cstring>

#include "errors.h"
#include "point_to_point.h"
#include "ranks.h"

using namespace lockstep;

namespace {

// A message with an optional callback.
struct MessageWithCallback : Message {
  bool complete() override { return callback != nullptr; }
  void run_callbacks() override { callback(); }
  std::function<void()> callback;
};

MessagePtr message(Op op, int peer, int tag, std::vector<char>& data) {
  auto post = std::make_shared<MessageWithCallback>();
  post->op = op;
  post->peer = peer;
  post->tag = tag;
  post->data = data.data();
  post->bytes = post->count = data.size();
  post->timeout = kTestTimeout;
  return post;
}

// Waits without a limit and returns the error of the message.
std::string wait_for_error(PointToPoint& p2p, const MessagePtr& post) {
  CHECK(p2p.wait(post));
  CHECK(post->done);
  return post->error;
}

void attach_callback(PointToPoint& p2p, const MessagePtr& post, std::function<void()> callback) {
  static_cast<MessageWithCallback&>(*post).callback = std::move(callback);
  p2p.progress_in_background(post);
}

void check_messages(int n) {
  on_ranks(n, [n](Group& group) {
    PointToPoint p2p(group);
    const int me = group.rank();
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<char>> out, in;
      std::vector<MessagePtr> posts;
      std::vector<std::pair<int, size_t>> which;
      const size_t sizes[] = {0, 1, 100, 256, 257, 5000, 70000};
      out.reserve(100);
      in.reserve(100);
      // Receives are posted in reverse order, so that messages arrive unexpectedly.
      for (int peer = 0; peer < n; ++peer)
        for (int tag = 0; tag < 7; ++tag) {
          out.emplace_back(sizes[tag], static_cast<char>(me * 16 + tag + round));
          posts.push_back(message(Op::send, peer, tag, out.back()));
          p2p.post(posts.back());
        }
      for (int peer = 0; peer < n; ++peer)
        for (int tag = 6; tag >= 0; --tag) {
          in.emplace_back(sizes[tag], 99);
          posts.push_back(message(Op::recv, peer, tag, in.back()));
          p2p.post(posts.back());
          which.emplace_back(peer, static_cast<size_t>(tag));
        }
      for (MessagePtr& post : posts) CHECK(wait_for_error(p2p, post).empty());
      for (size_t i = 0; i < in.size(); ++i)
        for (char byte : in[i])
          CHECK(byte ==
                static_cast<char>(which[i].first * 16 + static_cast<int>(which[i].second) + round));
    }
    run_barrier(group);
  });
}

}  // namespace

TEST(messages_are_read_from_the_senders_memory) {
  setenv("LOCKSTEP_CELL_BYTES", "256", 1);
  for (int n : {1, 2, 3}) check_messages(n);
  unsetenv("LOCKSTEP_CELL_BYTES");
}

TEST(messages_pass_through_bounce_buffers) {
  setenv("LOCKSTEP_CELL_BYTES", "256", 1);
  setenv("LOCKSTEP_BOUNCE_BYTES", "512", 1);
  setenv("LOCKSTEP_NO_READ", "1", 1);
  for (int n : {1, 2, 3}) check_messages(n);
  unsetenv("LOCKSTEP_CELL_BYTES");
  unsetenv("LOCKSTEP_BOUNCE_BYTES");
  unsetenv("LOCKSTEP_NO_READ");
}

namespace {

Channel& channel_from_0_to_1(Group& group) {
  return *reinterpret_cast<Channel*>(group.at(group.layout().channel(0, 1)));
}

constexpr size_t kPieceBytes = 512;

void with_small_pieces(const std::function<void(Group&)>& body) {
  setenv("LOCKSTEP_CELL_BYTES", "256", 1);
  setenv("LOCKSTEP_BOUNCE_BYTES", std::to_string(kPieceBytes).c_str(), 1);
  on_ranks(2, body);
  unsetenv("LOCKSTEP_CELL_BYTES");
  unsetenv("LOCKSTEP_BOUNCE_BYTES");
}

std::vector<char> numbered(size_t bytes) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 7 + i / kPieceBytes);
  return data;
}

}  // namespace

// Which of the two copies a piece depends on time.
TEST(ranks_that_wait_for_each_other_copy_their_messages_together) {
  with_small_pieces([](Group& group) {
    PointToPoint p2p(group);
    const std::vector<char> expected = numbered(200 * kPieceBytes + 3);
    for (int round = 0; round < 50; ++round) {
      std::vector<char> out = expected, in(expected.size());
      MessagePtr send = message(Op::send, 1 - group.rank(), 0, out);
      MessagePtr receive = message(Op::recv, 1 - group.rank(), 0, in);
      p2p.post(send);
      p2p.post(receive);
      CHECK(wait_for_error(p2p, receive).empty());
      CHECK(wait_for_error(p2p, send).empty());
      CHECK(in == expected);
    }
    run_barrier(group);
  });
}

namespace {

constexpr int kTicket = 5;
constexpr uint64_t kPieces = 10;

// Plays a sender that says that it waits, takes all pieces that are left, and sends none of
// them before the barrier. If the receiver is faster, it announces the message once more.
void send_late(Group& group, std::vector<char>& data) {
  char* const begin = group.at(group.layout().channel(0, 1));
  Channel& channel = channel_from_0_to_1(group);
  std::atomic<uint8_t>& ticket = channel.tickets[kTicket];
  Cell cell;
  cell.bytes = cell.count = data.size();
  cell.ticket = kTicket;
  cell.address = reinterpret_cast<uint64_t>(data.data());
  const size_t lines = (sizeof(Cell) + kCacheLine - 1) / kCacheLine;
  const size_t stride = lines * kCacheLine + group.layout().cell_bytes;
  group.rank_state(0).waiters = 1;
  Claims claims, more;
  bool is_taken = false;
  while (!is_taken) {
    ticket = kOpen;
    std::memcpy(begin + sizeof(Channel) + channel.tail % group.layout().cells * stride, &cell,
                sizeof cell);
    ++channel.tail;
    while (!is_taken && ticket != kConsumed) {
      more = claims = channel.claims;
      more.sent = kPieces - claims.read;
      is_taken = claims.belong_to(kTicket) && more.sent > 0 &&
                 channel.claims.compare_exchange_strong(claims, more);
    }
  }
  run_barrier(group);
  char* const bounce = begin + group.layout().channel_bytes() - 2 * kPieceBytes;
  for (uint32_t k = 0; k < more.sent; ++k) {
    while (k - channel.drained >= 2) yield_core();
    std::memcpy(bounce + k % 2 * kPieceBytes, &data[(kPieces - 1 - k) * kPieceBytes], kPieceBytes);
    channel.filled = k + 1;
    group.rank_state(1).doorbell.increment();
  }
  while (ticket != kConsumed) yield_core();
}

}  // namespace

TEST(a_receiver_gives_up_waiting_for_pieces_of_a_sender_that_stops) {
  with_small_pieces([](Group& group) {
    if (group.is_oversubscribed()) return;
    std::vector<char> expected = numbered(kPieces * kPieceBytes);
    if (group.rank() == 0) {
      send_late(group, expected);
      run_barrier(group);
      return;
    }
    PointToPoint p2p(group);
    Channel& channel = channel_from_0_to_1(group);
    MessagePtr receive;
    std::vector<char> in;
    do {
      in.assign(expected.size(), 0);
      receive = message(Op::recv, 0, 0, in);
      p2p.post(receive);
      while (!p2p.test(receive) && channel.claims.load().taken() < kPieces) yield_core();
      if (receive->done) CHECK(receive->error.empty() && in == expected);
    } while (receive->done);
    CHECK(!p2p.test(receive));
    CHECK(channel.tickets[kTicket] == kOpen);  // its memory is not read any more
    run_barrier(group);
    CHECK(wait_for_error(p2p, receive).empty());
    CHECK(in == expected);
    run_barrier(group);
  });
}

TEST(a_message_of_the_wrong_size_is_refused) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(group.rank() == 0 ? 10 : 11);
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 3, data);
    p2p.post(post);
    const std::string text = wait_for_error(p2p, post);
    if (group.rank() == 1) CHECK(contains(text, "rank 0 sent 10 elements"));
    run_barrier(group);
  });
}

TEST(waiting_for_a_message_from_a_dead_rank_fails) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = fork_idle_rank_one(*group);
  PointToPoint p2p(*group);
  std::vector<char> data(4);
  MessagePtr post = message(Op::recv, 1, 0, data);
  p2p.post(post);
  kill(child, SIGKILL);
  const auto begun = Clock::now();
  CHECK(contains(wait_for_error(p2p, post), "rank 1 died"));
  CHECK(Clock::now() - begun < std::chrono::seconds(1));
  waitpid(child, nullptr, 0);
}

TEST(a_rank_in_a_collective_still_receives_messages) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(100000, static_cast<char>(group.rank()));
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    p2p.post(post);
    if (group.rank() == 0)
      CHECK(wait_for_error(p2p, post).empty());  // arrives at the barrier only after that
    run_barrier(group);
    CHECK(wait_for_error(p2p, post).empty());
    CHECK(data[99999] == 0);
    run_barrier(group);
  });
}

// ---- background progress and callbacks ----

TEST(the_background_thread_progresses_while_a_collective_sleeps) {
  setenv("LOCKSTEP_BOUNCE_BYTES", "512", 1);
  setenv("LOCKSTEP_NO_READ", "1", 1);
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    group.make_progress = nullptr;  // so that the collective itself makes no progress
    std::vector<char> data(100000, static_cast<char>(group.rank()));
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    p2p.post(post);
    if (group.rank() == 0) CHECK(wait_for_error(p2p, post).empty());
    CHECK(error_of([&] { run_barrier(group); }).empty());
    CHECK(wait_for_error(p2p, post).empty());
    run_barrier(group);
  });
  unsetenv("LOCKSTEP_BOUNCE_BYTES");
  unsetenv("LOCKSTEP_NO_READ");
}

TEST(callbacks_do_not_run_in_callers_threads) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    for (int round = 0; round < 200; ++round) {
      std::vector<char> data(10), other(10);
      MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
      if (group.rank() == 0) {
        run_barrier(group);
        p2p.post(post);
        continue;
      }
      std::atomic<bool> called{false};
      const auto caller = std::this_thread::get_id();
      p2p.post(post);
      attach_callback(p2p, post, [&] {
        CHECK(std::this_thread::get_id() != caller);
        called = true;
      });
      run_barrier(group);
      while (!called) group.make_progress();
    }
    run_barrier(group);
  });
}

TEST(a_callback_may_wait_for_another_callback) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(10), other(10);
    MessagePtr first = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    MessagePtr last = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 2, other);
    std::atomic<bool> was_called{false}, is_done{false};
    if (group.rank() == 0) {
      run_barrier(group);
      p2p.post(first);
      p2p.post(last);
    } else {
      p2p.post(first);
      p2p.post(last);
      attach_callback(p2p, last, [&] { was_called = true; });
      attach_callback(p2p, first, [&] {
        while (!was_called) yield_core();
        is_done = true;
      });
      run_barrier(group);
      while (!is_done) yield_core();
    }
    run_barrier(group);
  });
}

// ---- timeouts and ranks that leave ----

TEST(the_timeout_starts_when_a_thread_waits) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(10);
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    post->timeout = std::chrono::milliseconds(300);
    if (group.rank() == 1) {
      p2p.post(post);
      const auto begun = Clock::now();
      while (Clock::now() - begun < post->timeout * 2) yield_core();  // it computes
      CHECK(!p2p.wait(post, std::chrono::milliseconds(50)));
      CHECK(!group.is_aborted());
    }
    run_barrier(group);
    if (group.rank() == 0) p2p.post(post);
    CHECK(wait_for_error(p2p, post).empty());
    run_barrier(group);
  });
}

TEST(a_timeout_names_the_message_and_unexpected_tags) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(10);
    const bool first = group.rank() == 0;
    MessagePtr post = message(first ? Op::send : Op::recv, 1 - group.rank(), first ? 5 : 6, data);
    post->timeout = std::chrono::milliseconds(100);
    p2p.post(post);
    run_barrier(group);
    if (first) {
      while (!group.is_aborted()) yield_core();  // it is alive, but does not call
      return;
    }
    const std::string text = wait_for_error(p2p, post);
    CHECK(contains(text,
                   "rank 1: recv from rank 0 (tag 6) on group default failed: rank 1 timed out"));
    CHECK(contains(text, "waiting for rank 0, last seen at #1 barrier"));
    CHECK(contains(text, "a message with tag 5 arrived from it but no receive was posted for it"));
  });
}

TEST(a_timeout_says_what_the_other_rank_waits_for) {
  for (const bool collective : {false, true})
    on_ranks(2, [&](Group& group) {
      PointToPoint p2p(group);
      run_barrier(group);
      std::vector<char> data(10);
      const bool first = group.rank() == 0;
      MessagePtr post = message(Op::recv, 1 - group.rank(), first ? 1 : 2, data);
      if (!first) {
        if (collective) {
          CHECK(contains(error_of([&] { run_barrier(group); }), "rank 0 timed out"));
        } else {
          p2p.post(post);
          CHECK(contains(wait_for_error(p2p, post), "rank 0 timed out"));
        }
        return;
      }
      const std::string other = collective ? "barrier #2" : "recv from rank 0 (tag 2)";
      const auto until = Clock::now() + kTestTimeout;
      while (!contains(group.describe_peer(1), "now waiting in " + other))
        CHECK(Clock::now() < until);
      post->timeout = std::chrono::milliseconds(50);
      p2p.post(post);
      const std::string text = wait_for_error(p2p, post);
      CHECK(contains(text, "in recv from rank 1 (tag 1), waiting for rank 1, last seen at #"));
      CHECK(contains(text, ", now waiting in " + other));
    });
}

TEST(a_receive_from_any_rank_fails_when_all_others_have_left) {
  on_ranks(3, [](Group& group) {
    PointToPoint p2p(group);
    run_barrier(group);
    if (group.rank() != 0) {
      p2p.stop();
      return group.leave();
    }
    std::vector<char> data(10);
    MessagePtr post = message(Op::recv, -1, 0, data);
    p2p.post(post);
    CHECK(contains(wait_for_error(p2p, post), "all other ranks have left the group"));
  });
}

TEST(a_receive_from_a_rank_that_left_names_the_tags_that_arrived) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(10);
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(),
                              group.rank() == 0 ? 1 : 2, data);
    p2p.post(post);
    run_barrier(group);
    if (group.rank() == 0) {
      p2p.stop();
      return group.leave();
    }
    CHECK(contains(wait_for_error(p2p, post),
                   "rank 0 has left the group; a message with tag 1 arrived from it but no"));
  });
}

TEST(a_rank_that_leaves_revokes_its_unreceived_sends) {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(100000, static_cast<char>(7));
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    if (group.rank() == 0) {
      p2p.post(post);
      run_barrier(group);
      p2p.stop();
      CHECK(contains(post->error, "failed: rank 0 left the group first"));
      std::memset(data.data(), 9, data.size());  // its memory may be reused
      return group.leave();
    }
    run_barrier(group);
    while (check_health(group.rank_state(0)) != Health::left) yield_core();
    p2p.post(post);
    CHECK(contains(wait_for_error(p2p, post), "rank 0 has left the group"));
    for (char byte : data) CHECK(byte == 7);
  });
}

// ---- memory that cannot be mapped ----

namespace {

// A group of two where rank 0 sends from shared memory that rank 1 cannot map.
void check_unmapped() {
  on_ranks(2, [](Group& group) {
    PointToPoint p2p(group);
    std::vector<char> data(100000, 1);
    MessagePtr post = message(group.rank() == 0 ? Op::send : Op::recv, 1 - group.rank(), 1, data);
    if (group.rank() == 0) {
      post->data = static_cast<char*>(Heap::instance().allocate(post->bytes));
      std::memset(post->data, 3, post->bytes);
    }
    run_barrier(group);
    rlimit before{}, none{};
    if (group.rank() == 1) {
      CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
      none.rlim_max = before.rlim_max;
      CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);  // no file descriptor is free
    }
    p2p.post(post);
    CHECK(wait_for_error(p2p, post).empty());
    if (group.rank() == 1) {
      CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
      for (char byte : data) CHECK(byte == 3);
    } else {
      Heap::instance().free(post->data);
    }
    run_barrier(group);
  });
}

}  // namespace

TEST(a_region_that_cannot_be_mapped_is_read_another_way) {
  check_unmapped();
  setenv("LOCKSTEP_NO_READ", "1", 1);
  check_unmapped();
  unsetenv("LOCKSTEP_NO_READ");
}

TEST(a_rank_that_died_before_its_region_was_mapped_is_named) {
  if (!kMayFork) return;
  auto group = Group::create(2, {});
  const pid_t child = fork_rank_one(group->segment()->handle(), [](Group& other) {
    PointToPoint p2p(other);
    std::vector<char> unused(100000);
    MessagePtr post = message(Op::send, 0, 1, unused);
    post->data = static_cast<char*>(Heap::instance().allocate(post->bytes));
    p2p.post(post);
    run_barrier(other);
    raise(SIGKILL);
  });
  run_barrier(*group);
  waitpid(child, nullptr, 0);
  PointToPoint p2p(*group);
  std::vector<char> data(100000);
  MessagePtr post = message(Op::recv, 1, 1, data);
  p2p.post(post);
  const std::string text = wait_for_error(p2p, post);
  CHECK(contains(text, "rank 0: recv from rank 1 (tag 1) on group default failed: rank 1 died"));
}
