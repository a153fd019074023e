// Send and receive: what a rank has posted, and moving it along the channels.
//
// `progress` moves everything that can move and never blocks. Whoever waits for a
// message calls it, and so does who waits in a collective. Where nobody does but a send
// is under way, somebody listens to a message, or the one in the collective sleeps, a
// thread does (it is started when it is first needed, and sleeps on the rank's bell).
//
//     short (fits a cell)   copied into the channel at once: the send is complete
//     long                  the receiver takes it from the sender's memory, where
//                           the kernel lets it (process_vm_readv) or where it lies
//                           in a segment: one copy, and the sender need not act;
//                           otherwise through the channel's lane
//
// Messages match by (source, tag) in the order of sending, as in MPI. A message to
// oneself is copied aside, so that it need not be received first.
//
// What becomes of a message does not depend on whether anybody waits for it:
//
//     posted ──> over (moved, or failed) ──> settled ──> done ──> announced
//                under the lock              by whoever           in a thread of the
//                                            moved it             callbacks, if at all
//
// Time runs for who waits, from when it begins to: a message may be posted long before
// it can come. Who listens waits too. A message that nobody waits for has no deadline.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "callbacks.h"
#include "channel.h"
#include "group.h"

namespace lockstep {

struct Message {
  virtual ~Message() = default;
  // Called once, when the message is over, with no lock held: puts what has come in its
  // place and lets go of memory. Are there callbacks to run? Must not throw.
  virtual bool settle() { return false; }
  virtual void announce() {}  // runs them; they may do anything

  Op op = Op::recv;
  int peer = -1;  // -1: receive from anybody
  int64_t tag = 0;
  char* data = nullptr;  // stays valid until `settle`
  uint64_t bytes = 0, count = 0;
  uint8_t dtype = 0;
  std::chrono::milliseconds timeout{};  // of who waits without a patience of its own

  std::atomic<bool> done{false};  // over, and settled
  int source = -1;                // of a received message
  std::string error;              // why it failed: the whole sentence

  // The mail's own, under its lock.
  bool over = false, heard = false;
  Clock::time_point heard_since;
  int ticket = -1;     // of a long send
  uint64_t moved = 0;  // bytes through the lane so far
};
using Post = std::shared_ptr<Message>;

class Mail {
 public:
  explicit Mail(Group& group);
  ~Mail() { stop(); }
  // Fails what is not over, takes back what nobody has taken, runs all callbacks.
  void stop();

  void post(const Post& message);  // a send or a receive, as its `op` says
  // Blocks until it is done. False: the caller's own patience (0: none) was over first,
  // and the message goes on. After the message's timeout the group is given up.
  bool wait(const Post& message, std::chrono::milliseconds patience = {});
  // Moves what can move; whether the message is done.
  bool test(const Post& message);
  // Moves it also where nobody waits, within the message's timeout from now on.
  void listen(const Post& message);
  // "rank 0: recv from rank 1 (tag 0) on group default"
  std::string titled(const Message& message) const;

 private:
  class Waiting;
  class Attendance;
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
  using Posts = std::vector<Post>;

  // mail.cpp: what is over, and what becomes of it
  std::string described(const Message& message) const;  // "recv from rank 1 (tag 0)"
  template <typename Step>
  void attempt(Posts& over, Step step);
  void move();
  void finish(const Post& message, Posts& over, const std::string& why = "");
  void fail_all(const std::string& why, Posts& over);
  void settle(Posts& over);

  // mail_wait.cpp: waiting, and the thread
  bool all_left(const Message& message);
  void give_up(const Message& message, std::chrono::milliseconds waited);
  std::string unasked(int source);
  void check_heard();
  bool attended() const;
  void rest(bool resting);
  void run();
  void start_thread();

  // mail_move.cpp: the channels
  Channel& channel(int from, int to);
  Cell& cell(int from, int to, uint32_t number);
  char* payload(Cell& cell);
  char* lane(int from, int to, uint32_t half);
  void progress(Posts& over);
  void receive_from(int source, Posts& over);
  void stream_in(int source, Posts& over);
  void send_to(int target, Posts& over);
  bool announce(const Post& message, Posts& over);
  void stream_out(int target, Message& message);
  std::list<Post>::iterator matching(int source, int64_t tag);
  void deliver(const Post& message, int source, const Cell& cell, const char* payload,
               Posts& over);
  bool take(const Post& message, int source, const Cell& cell);
  bool read_shared(const Cell& cell, char* to);
  bool read_private(int source, const Cell& cell, char* to);
  void take_back(int target, const Message& message);
  void close(int source, const Cell& cell, Ticket result);

  Group& group_;
  const int me_, n_;
  std::mutex mutex_;
  std::list<Post> wanted_;                    // receives, in the order they were posted
  std::vector<std::list<Arrived>> arrived_;   // by source
  std::vector<std::deque<Stream>> streams_;   // by source
  std::vector<std::deque<Post>> waiting_;     // sends that found no cell, by target
  std::vector<std::list<Post>> announced_;    // long sends, by target
  std::vector<uint8_t> readable_;             // by source: 0 unknown, 1 yes, 2 no
  Posts heard_;                               // to which somebody listens
  int resting_ = 0;                           // threads asleep in a collective
  bool stopping_ = false;
  std::atomic<int> unfinished_{0};
  std::atomic<int> waiters_{0};               // threads in `wait`: they do the moving
  std::atomic<bool> awake_{false};            // our thread looks at the bell
  std::condition_variable changed_;
  std::thread thread_;
  Callbacks callbacks_;
};

}  // namespace lockstep
