// Send and receive: what a rank has posted, and moving it along the channels.
//
// `progress` moves everything that can move and never blocks. Whoever waits for a
// message calls it; where nobody waits but a send is under way, a thread does (it
// is started when it is first needed, and sleeps on the rank's bell).
//
//     short (fits a cell)   copied into the channel at once: the send is complete
//     long                  the receiver takes it from the sender's memory, where
//                           the kernel lets it (process_vm_readv) or where it lies
//                           in a segment: one copy, and the sender need not act;
//                           otherwise through the channel's lane
//
// Messages match by (source, tag) in the order of sending, as in MPI. A message to
// oneself is copied aside, so that it need not be received first.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "channel.h"
#include "group.h"

namespace lockstep {

struct Message {
  Op op = Op::recv;
  int peer = -1;  // -1: receive from anybody
  int64_t tag = 0;
  char* data = nullptr;
  uint64_t bytes = 0, count = 0;
  uint8_t dtype = 0;
  std::chrono::milliseconds timeout{};
  Clock::time_point begun;

  std::atomic<bool> done{false};
  int source = -1;      // of a received message
  std::string error;    // why it failed, once done
  int ticket = -1;      // of a long send
  uint64_t moved = 0;   // bytes through the lane so far
  std::function<void()> then;  // called once, when done, by whoever finds it done
};
using Post = std::shared_ptr<Message>;

class Mail {
 public:
  explicit Mail(Group& group);
  ~Mail() { stop(); }
  void stop();

  void post(const Post& message);  // a send or a receive, as its `op` says
  // Blocks until it is done; throws Failure.
  void wait(const Post& message, std::chrono::milliseconds timeout);
  // Moves what can move; whether the message is done.
  bool test(const Post& message);
  // Calls `then` when the message is done, even where nobody waits.
  void notify(const Post& message, std::function<void()> then);

 private:
  class Waiting;
  struct Arrived {  // but not asked for yet
    int source;
    Cell cell;
    std::vector<char> payload;
  };
  struct Stream {  // a long message that passes through a lane
    Post message;
    Cell cell;
    bool granted = false;
  };

  Channel& channel(int from, int to);
  Cell& cell(int from, int to, uint32_t number);
  char* payload(Cell& cell);
  char* lane(int from, int to, uint32_t half);

  void progress(std::vector<Post>& done);
  void receive_from(int source, std::vector<Post>& done);
  void stream_in(int source, std::vector<Post>& done);
  void send_to(int target, std::vector<Post>& done);
  bool announce(const Post& message, std::vector<Post>& done);
  void stream_out(int target, Message& message);
  Post matching(int source, int64_t tag);
  void deliver(const Post& message, int source, const Cell& cell, const char* payload,
               std::vector<Post>& done);
  bool take(const Post& message, int source, const Cell& cell);
  bool read_private(int source, const Cell& cell, char* to);
  void close(int source, const Cell& cell, uint8_t result);
  void finish(const Post& message, std::vector<Post>& done, std::string error = "");
  void fail_all(const std::string& reason, std::vector<Post>& done);
  void settle(std::vector<Post>& done);
  bool busy() const;
  void run();
  void start_thread();
  std::string described(const Message& message) const;

  Group& group_;
  const int me_, n_;
  std::mutex mutex_;
  std::list<Post> wanted_;                    // receives, in the order they were posted
  std::vector<std::list<Arrived>> arrived_;   // by source
  std::vector<std::deque<Stream>> streams_;   // by source
  std::vector<std::deque<Post>> waiting_;     // sends that found no cell, by target
  std::vector<std::list<Post>> announced_;    // long sends, by target
  std::vector<uint8_t> readable_;             // by source: 0 unknown, 1 yes, 2 no
  std::atomic<int> unfinished_{0};
  int waiters_ = 0, notified_ = 0;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;
  int owner_;
};

}  // namespace lockstep
