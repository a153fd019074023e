// Send and receive: the messages that a rank has posted, and their progress along the
// channels.
//
// `progress` moves everything that can move and never blocks. A thread that waits for a
// message calls it, and so does one that waits in a collective. A background thread does
// when nobody else would: while a send is pending, a message has a future, or the thread
// in the collective sleeps. It starts on first use and sleeps on the rank's doorbell.
//
//     eager (fits a cell)   copied into the channel at once: the send is complete
//     rendezvous            the receiver copies from the sender's memory, if that is in a
//                           segment or the kernel allows it (process_vm_readv): one copy,
//                           and the sender need not act; otherwise, or if the sender waits
//                           and a core is free for it, the message passes through the
//                           channel's bounce buffer, which is faster: both ranks copy
//
// Messages match by (source, tag) in the order of sending, as in MPI. A message that a rank
// sends to itself is copied aside, so that the send completes before the receive is posted.
//
// A message takes the same path whether or not anybody waits for it:
//
//     posted ──> finished (moved or failed) ──> complete() ──> done ──> run_callbacks()
//                under the lock                 in the thread           in a thread of the
//                                               that moved it           callback pool
//
// The timeout of a message starts when a thread waits for it or attaches a future to it,
// not when it is posted: a receive may be posted long before the message can arrive. A
// message that nobody waits for has no timeout.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "auto_tuner.h"
#include "channel.h"
#include "group.h"
#include "message_matching.h"
#include "peer_memory.h"
#include "threads.h"

namespace lockstep {

struct Message {
  virtual ~Message() = default;
  // Called once when the message is finished, with no lock held: copies what was received
  // to its tensor and releases memory. Returns whether there are callbacks to run. Must
  // not throw.
  virtual bool complete() { return false; }
  virtual void run_callbacks() {}

  Op op = Op::recv;
  int peer = -1;  // -1: receive from any rank
  int64_t tag = 0;
  char* data = nullptr;  // stays valid until `complete`
  uint64_t bytes = 0, count = 0;
  uint8_t dtype = 0;
  std::chrono::milliseconds timeout{};

  std::atomic<bool> done{false};  // finished and completed
  int source = -1;                // of a received message
  std::string error;              // the full message; empty: no error
  Failure failure;                // the reason of the error

  // Used by PointToPoint, under its lock.
  bool is_finished = false, is_in_background = false;
  Clock::time_point background_since;
  int ticket = -1;  // of a rendezvous send
};
using MessagePtr = std::shared_ptr<Message>;

class PointToPoint {
 public:
  explicit PointToPoint(Group& group);
  ~PointToPoint() { stop(); }
  // Fails unfinished messages, revokes sends that nobody has taken, runs all callbacks.
  void stop();

  void post(const MessagePtr& message);  // a send or a receive, according to its `op`
  // Blocks until the message is done. Returns false if `limit` (0: none) expires first; the
  // message then goes on. After the message's own timeout the group is aborted.
  bool wait(const MessagePtr& message, std::chrono::milliseconds limit = {});
  // Makes progress without blocking. Returns whether the message is done.
  bool test(const MessagePtr& message);
  // Finishes a receive with an error, unless a message has taken it. Returns whether it did.
  bool cancel(const MessagePtr& receive);
  // Makes progress in the background, within the message's timeout from now on.
  void progress_in_background(const MessagePtr& message);
  std::string describe(const Message& message) const;  // "recv from rank 1 (tag 0)"
  // "rank 0: recv from rank 1 (tag 0) on group default"
  std::string describe_in_group(const Message& message) const;

 private:
  class MessageWaitObserver;
  class BackgroundObserver;
  class WaiterScope;
  struct BounceReceive {  // of a message that passes through a bounce buffer
    MessagePtr message;
    Cell cell;
    bool has_begun = false;
    uint64_t received = 0;  // pieces
  };
  struct Piece {
    uint64_t offset, bytes;
  };
  using Messages = std::vector<MessagePtr>;

  // Completion. Finished messages are collected under the lock and completed without it.
  void progress();
  template <typename Step>
  void abort_on_error(Messages& finished, Step step);
  void finish(const MessagePtr& message, Messages& finished, const Failure& failure = {});
  void fail_all(const Failure& failure, Messages& finished);
  void complete(Messages& finished);

  // Waiting, and the background thread.
  bool have_peers_left(const Message& message);
  void abort_timed_out(const Message& message, std::chrono::milliseconds waited);
  std::string describe_unexpected(int source);
  void check_background_timeouts();
  bool is_driven_by_waiters() const;
  void on_collective_sleep(bool is_sleeping);
  void start_thread();
  void run_thread();

  // Moving along the channels: everything here runs under the lock and does not block.
  Channel& channel(int from, int to);
  Cell& cell(int from, int to, uint32_t number);
  char* payload(Cell& cell);
  char* bounce_buffer(int from, int to, uint32_t half);
  void ring_doorbell(int rank) { group_.rank_state(rank).doorbell.increment(); }
  void progress_channels(Messages& finished);
  void receive_from(int source, Messages& finished);
  bool receive_unexpected(const MessagePtr& receive, Messages& finished);
  void deliver(const MessagePtr& message, int source, const Cell& cell, const char* payload,
               Messages& finished);
  bool copy_from_sender(const MessagePtr& message, int source, const Cell& cell,
                        Messages& finished);
  bool copy_with_sender(BounceReceive& receive, int source, Messages& finished);
  uint64_t count_pieces(uint64_t bytes) const;
  Piece piece_from_back(uint64_t number, uint64_t bytes) const;
  void begin_bounce(int source, BounceReceive& receive);
  bool drain_bounce_buffer(int source, BounceReceive& receive);
  void close_ticket(int source, const Cell& cell, TicketState result);
  void receive_through_bounce_buffer(int source, Messages& finished);
  void send_to(int target, Messages& finished);
  bool start_send(const MessagePtr& message, Messages& finished);
  void send_through_bounce_buffer(int target, Message& message);
  void revoke_send(int target, const Message& message);

  Group& group_;
  const int rank_, size_;
  std::mutex mutex_;
  PostedReceives posted_receives_;
  std::vector<UnexpectedMessages> unexpected_;              // by source
  std::vector<std::deque<BounceReceive>> bounce_receives_;  // by source
  std::vector<std::deque<MessagePtr>> pending_sends_;       // found no free cell; by target
  std::vector<std::list<MessagePtr>> rendezvous_sends_;     // announced; by target
  PeerMemory peer_memory_;
  std::map<int, AutoTuner> read_tuners_;  // with the sender or alone; by power of two of the bytes
  Messages background_;                   // see `progress_in_background`
  int sleeping_collectives_ = 0;          // threads asleep in a collective
  bool stopping_ = false;
  std::atomic<int> unfinished_{0};
  std::atomic<int> waiters_{0};  // threads in `wait`, which make progress
  std::atomic<bool> thread_awake_{false};
  std::condition_variable changed_;
  std::thread thread_;
  CallbackPool callbacks_;
};

}  // namespace lockstep
