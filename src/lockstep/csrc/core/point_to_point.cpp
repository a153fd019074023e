#include "point_to_point.h"

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "activity.h"
#include "errors.h"
#include "kernels.h"

namespace lockstep {

using std::chrono::milliseconds;

PointToPoint::PointToPoint(Group& group)
    : group_(group), rank_(group.rank()), size_(group.size()), peer_memory_(group) {
  const auto n = static_cast<size_t>(size_);
  unexpected_.resize(n);
  bounce_receives_.resize(n);
  pending_sends_.resize(n);
  rendezvous_sends_.resize(n);
  group_.make_progress = [this] {
    if (unfinished_.load(std::memory_order_relaxed) != 0) progress();
  };
  group_.on_sleep = [this](bool is_sleeping) { on_collective_sleep(is_sleeping); };
}

void PointToPoint::stop() {
  Messages finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      stopping_ = true;
      abort_on_error(finished, [&] { progress_channels(finished); });  // what has arrived
      fail_all(group_.format_rank(rank_) + " left the group first", finished);
    }
  }
  changed_.notify_all();
  ring_doorbell(rank_);
  complete(finished);
  if (thread_.joinable()) thread_.join();
  callbacks_.stop();
  group_.make_progress = nullptr;
  group_.on_sleep = nullptr;
}

std::string PointToPoint::describe(const Message& message) const {
  std::string text = op_name(message.op);
  text += message.op == Op::send ? " to " : " from ";
  text += message.peer < 0 ? "any rank" : group_.format_rank(message.peer);
  return text + " (tag " + std::to_string(message.tag) + ")";
}

std::string PointToPoint::describe_in_group(const Message& message) const {
  return group_.format_rank(rank_) + ": " + describe(message) + " on group " + group_.info().name;
}

void PointToPoint::post(const MessagePtr& message) {
  Messages finished;
  const int peer = message->peer < 0 ? -1 : group_.global_rank(message->peer);
  publish_call(op_name(message->op), peer, 0, message->count, group_.info().name, Clock::now());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_send = message->op == Op::send;
    ++unfinished_;
    if (is_send) pending_sends_[static_cast<size_t>(message->peer)].push_back(message);
    abort_on_error(finished, [&] {
      if (is_send) {
        send_to(message->peer, finished);
      } else if (!receive_unexpected(message, finished)) {
        posted_receives_.add(message->peer, message->tag, message);
        progress_channels(finished);
      }
    });
    if (group_.is_aborted()) finish(message, finished, group_.failure());
    if (stopping_) fail_all(group_.format_rank(rank_) + " has left the group", finished);
    if (!message->is_finished && (is_send || sleeping_collectives_ > 0)) start_thread();
  }
  complete(finished);
}

bool PointToPoint::test(const MessagePtr& message) {
  if (!message->done) progress();
  return message->done;
}

void PointToPoint::progress_in_background(const MessagePtr& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (message->is_finished || message->is_in_background) return;
  message->is_in_background = true;
  message->background_since = Clock::now();
  background_.push_back(message);
  start_thread();
}

// ---- completion ----

void PointToPoint::progress() {
  Messages finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    abort_on_error(finished, [&] { progress_channels(finished); });
  }
  complete(finished);
}

// An error while moving messages aborts the group: the other side would wait forever.
template <typename Step>
void PointToPoint::abort_on_error(Messages& finished, Step step) {
  if (!group_.is_aborted()) try {
      step();
    } catch (const CommError& error) {
      Failure failure = error.failure;
      failure.reason = group_.format_rank(rank_) + " cannot move its messages: " + error.what();
      group_.abort_if_rank_died();  // the better reason, if it applies
      group_.abort(failure);
    } catch (const std::exception& error) {
      group_.abort_if_rank_died();
      group_.abort(group_.format_rank(rank_) + " cannot move its messages: " + error.what());
    }
  if (group_.is_aborted()) fail_all(group_.failure(), finished);
}

void PointToPoint::finish(const MessagePtr& message, Messages& finished, const Failure& failure) {
  if (message->is_finished) return;  // it was in two lists when moving threw
  finished.push_back(message);
  message->is_finished = true;
  if (!failure.reason.empty()) {
    message->failure = failure;
    message->error = describe_in_group(*message) + " failed: " + failure.text();
  }
  if (message->is_in_background) std::erase(background_, message);
  --unfinished_;
}

bool PointToPoint::cancel(const MessagePtr& receive) {
  Messages finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (posted_receives_.remove(receive->peer, receive->tag, receive))
      finish(receive, finished, {"it was cancelled"});
  }
  const bool is_cancelled = !finished.empty();
  complete(finished);
  return is_cancelled;
}

void PointToPoint::fail_all(const Failure& failure, Messages& finished) {
  for (const MessagePtr& message : posted_receives_.take_all()) finish(message, finished, failure);
  for (int rank = 0; rank < size_; ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (const BounceReceive& receive : bounce_receives_[r])
      finish(receive.message, finished, failure);
    for (const MessagePtr& message : pending_sends_[r]) finish(message, finished, failure);
    for (const MessagePtr& message : rendezvous_sends_[r]) {
      revoke_send(rank, *message);
      finish(message, finished, failure);
    }
    bounce_receives_[r].clear();
    pending_sends_[r].clear();
    rendezvous_sends_[r].clear();
  }
}

void PointToPoint::complete(Messages& finished) {
  if (finished.empty()) return;
  for (const MessagePtr& message : finished) {
    const bool has_callbacks = message->complete();
    message->done.store(true, std::memory_order_seq_cst);
    if (has_callbacks) callbacks_.submit([message] { message->run_callbacks(); });
  }
  finished.clear();
  // Another thread may sleep until one of these is done, or until nothing is left to do.
  if (waiters_.load(std::memory_order_seq_cst) > 0 || thread_awake_.load(std::memory_order_seq_cst))
    ring_doorbell(rank_);
}

// ---- waiting ----

static milliseconds time_since(Clock::time_point begun) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
}

struct WaitEnded {};  // thrown to end a wait; the loop around the wait finds out why

class PointToPoint::MessageWaitObserver : public WaitObserver {
 public:
  MessageWaitObserver(PointToPoint& p2p, const Message& message, milliseconds limit)
      : p2p_(p2p), message_(message), limit_(limit), begun_(Clock::now()) {}

  bool is_expired() const { return limit_ > milliseconds(0) && time_since(begun_) > limit_; }
  bool is_stopped() const override { return p2p_.group_.is_aborted(); }
  void on_sleep(bool is_sleeping) override {
    const std::string what = p2p_.describe(message_);
    if (is_sleeping) {
      p2p_.group_.begin_sleep(what);
      begin_wait(what + " of group " + p2p_.group_.info().name, begun_, kNotSaid,
                 message_.op == Op::recv ? CallKind::receive : CallKind::send);
    } else {
      end_wait();
      p2p_.group_.end_sleep(what);
    }
  }
  void check() override {
    Group& group = p2p_.group_;
    group.poll_signals();
    group.abort_if_rank_died();
    if (group.is_aborted() || message_.done || is_expired()) throw WaitEnded{};
    if (p2p_.have_peers_left(message_)) {
      // What they sent before they left may still be in the channel.
      p2p_.progress();
      if (!message_.done) {
        const bool is_any = message_.peer < 0;
        const std::string who =
            is_any ? "all other ranks have" : group.format_rank(message_.peer) + " has";
        const bool is_receive = message_.op == Op::recv;
        group.abort({who + " left the group", Loss::left,
                     is_any ? -1 : group.global_rank(message_.peer),
                     is_receive ? p2p_.describe_unexpected(message_.peer) : ""});
      }
      throw WaitEnded{};
    }
    if (limit_ > milliseconds(0) || time_since(begun_) <= message_.timeout) return;
    p2p_.abort_timed_out(message_, time_since(begun_));
    throw WaitEnded{};
  }

 private:
  PointToPoint& p2p_;
  const Message& message_;
  const milliseconds limit_;
  const Clock::time_point begun_;
};

// While a thread waits, and so makes progress, the background thread need not.
class PointToPoint::WaiterScope {
 public:
  explicit WaiterScope(PointToPoint& p2p) : p2p_(p2p) {
    ++p2p_.waiters_;
    ++p2p_.group_.rank_state(p2p_.rank_).waiters;
  }
  ~WaiterScope() {
    std::lock_guard<std::mutex> lock(p2p_.mutex_);
    --p2p_.waiters_;
    --p2p_.group_.rank_state(p2p_.rank_).waiters;
    p2p_.changed_.notify_all();
  }

 private:
  PointToPoint& p2p_;
};

bool PointToPoint::wait(const MessagePtr& message, milliseconds limit) {
  if (test(message)) return true;
  MessageWaitObserver observer(*this, *message, limit);
  const SpinPolicy policy = SpinPolicy::choose(group_.is_oversubscribed(), false);
  Flag& doorbell = group_.rank_state(rank_).doorbell;
  WaiterScope scope(*this);
  while (true) {
    const uint32_t seen = doorbell.value.load(std::memory_order_acquire);
    if (test(message)) return true;
    if (observer.is_expired()) return false;
    try {
      wait_for(
          doorbell, [&](uint32_t value) { return value != seen || message->done; }, policy,
          observer);
    } catch (const WaitEnded&) {
    }
  }
}

bool PointToPoint::have_peers_left(const Message& message) {
  const auto has_left = [&](int rank) {
    return check_health(group_.rank_state(rank)) == Health::left;
  };
  if (message.peer >= 0) return message.peer != rank_ && has_left(message.peer);
  for (int rank = 0; rank < size_; ++rank)
    if (rank != rank_ && !has_left(rank)) return false;
  return size_ > 1;
}

void PointToPoint::abort_timed_out(const Message& message, milliseconds waited) {
  std::string text = group_.format_rank(rank_) + " timed out after " + format_seconds(waited) +
                     " with a timeout of " + format_seconds(message.timeout) + " in " +
                     describe(message);
  if (message.peer >= 0) text += ", waiting for " + group_.describe_peer(message.peer);
  if (message.op == Op::recv) text += describe_unexpected(message.peer);
  group_.abort(text);
}

// Names the tags that have arrived without a receive: often one of them is a typo.
std::string PointToPoint::describe_unexpected(int source) {
  std::vector<int64_t> tags;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int rank = 0; rank < size_; ++rank)
      if (source < 0 || source == rank)
        for (int64_t tag : unexpected_[static_cast<size_t>(rank)].first_tags(3))
          if (std::find(tags.begin(), tags.end(), tag) == tags.end() && tags.size() < 3)
            tags.push_back(tag);
  }
  if (tags.empty()) return "";
  std::string text = tags.size() == 1 ? "; a message with tag " : "; messages with tags ";
  for (size_t i = 0; i < tags.size(); ++i) text += (i ? ", " : "") + std::to_string(tags[i]);
  return text + (source < 0 ? " arrived" : " arrived from it") + " but no receive was posted for " +
         (tags.size() == 1 ? "it" : "them");
}

// ---- the background thread ----

void PointToPoint::check_background_timeouts() {
  MessagePtr late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const MessagePtr& message : background_)
      if (time_since(message->background_since) > message->timeout) late = message;
  }
  if (late) abort_timed_out(*late, time_since(late->background_since));
}

// Whether other threads make all the progress that is possible.
bool PointToPoint::is_driven_by_waiters() const {
  if (waiters_ > 0) return true;
  if (!background_.empty() || (sleeping_collectives_ > 0 && unfinished_ > 0)) return false;
  for (size_t rank = 0; rank < pending_sends_.size(); ++rank)
    if (!pending_sends_[rank].empty() || !rendezvous_sends_[rank].empty()) return false;
  return true;
}

void PointToPoint::on_collective_sleep(bool is_sleeping) {
  std::lock_guard<std::mutex> lock(mutex_);
  sleeping_collectives_ += is_sleeping ? 1 : -1;
  if (is_sleeping && unfinished_ > 0) start_thread();
}

void PointToPoint::start_thread() {
  if (!thread_.joinable() && !stopping_)
    thread_ = std::thread([this] { run_thread(); });
  else
    changed_.notify_all();
}

class PointToPoint::BackgroundObserver : public WaitObserver {
 public:
  explicit BackgroundObserver(PointToPoint& p2p) : p2p_(p2p) {}
  bool is_stopped() const override { return p2p_.group_.is_aborted(); }
  void check() override {
    p2p_.group_.abort_if_rank_died();
    if (!p2p_.group_.is_aborted()) p2p_.check_background_timeouts();
    if (p2p_.group_.is_aborted()) throw WaitEnded{};  // `progress` then fails all messages
  }

 private:
  PointToPoint& p2p_;
};

void PointToPoint::run_thread() {
  pthread_setname_np(pthread_self(), "lockstep-p2p");
  Flag& doorbell = group_.rank_state(rank_).doorbell;
  const SpinPolicy policy = SpinPolicy::choose(group_.is_oversubscribed(), true);
  BackgroundObserver observer(*this);
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      thread_awake_ = false;
      changed_.wait(lock, [&] { return stopping_ || !is_driven_by_waiters(); });
      if (stopping_) return;
      thread_awake_ = true;
    }
    const uint32_t seen = doorbell.value.load(std::memory_order_acquire);
    progress();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (is_driven_by_waiters()) continue;
    }
    try {
      wait_for(doorbell, [&](uint32_t value) { return value != seen; }, policy, observer);
      // The observer does not get to check while the doorbell rings all the time.
      if (!group_.is_aborted()) check_background_timeouts();
    } catch (const WaitEnded&) {
    }
  }
}

// ---- addresses in the channels ----

Channel& PointToPoint::channel(int from, int to) {
  return *reinterpret_cast<Channel*>(group_.at(group_.layout().channel(from, to)));
}

Cell& PointToPoint::cell(int from, int to, uint32_t number) {
  const Layout& layout = group_.layout();
  const uint64_t stride = round_to_lines(sizeof(Cell)) + round_to_lines(layout.cell_bytes);
  return *reinterpret_cast<Cell*>(group_.at(
      layout.channel(from, to) + round_to_lines(sizeof(Channel)) + number % layout.cells * stride));
}

char* PointToPoint::payload(Cell& cell) {
  return reinterpret_cast<char*>(&cell) + round_to_lines(sizeof(Cell));
}

char* PointToPoint::bounce_buffer(int from, int to, uint32_t half) {
  const Layout& layout = group_.layout();
  return group_.at(layout.channel(from, to) + layout.channel_bytes() -
                   (2 - half % 2) * round_to_lines(layout.bounce_bytes));
}

void PointToPoint::progress_channels(Messages& finished) {
  for (int rank = 0; rank < size_; ++rank) {
    receive_from(rank, finished);
    receive_through_bounce_buffer(rank, finished);
    send_to(rank, finished);
  }
}

// ---- receiving ----

// Gives a receive a message that was set aside. Returns false if there is none.
bool PointToPoint::receive_unexpected(const MessagePtr& receive, Messages& finished) {
  for (int source = 0; source < size_; ++source) {
    if (receive->peer >= 0 && receive->peer != source) continue;
    const auto message = unexpected_[static_cast<size_t>(source)].take(receive->tag);
    if (!message) continue;
    deliver(receive, source, message->cell, message->payload.data(), finished);
    return true;
  }
  return false;
}

void PointToPoint::receive_from(int source, Messages& finished) {
  if (source == rank_) return;
  Channel& in = channel(source, rank_);
  uint32_t head = in.head.load(std::memory_order_relaxed);
  bool any_received = false;
  while (head != in.tail.load(std::memory_order_acquire)) {
    Cell& shared_cell = cell(source, rank_, head);
    const Cell next = shared_cell;  // one copy: what is checked is what is used
    const bool is_rendezvous = next.ticket >= 0;
    if (next.ticket >= kTickets || (!is_rendezvous && next.bytes > group_.layout().cell_bytes))
      throw CommError(group_.format_rank(source) + " wrote invalid sizes into shared memory");
    const char* data = payload(shared_cell);
    if (const MessagePtr receive = posted_receives_.take(source, next.tag)) {
      deliver(receive, source, next, data, finished);
    } else {
      unexpected_[static_cast<size_t>(source)].add(
          {next, {data, data + (is_rendezvous ? 0 : next.bytes)}});
    }
    in.head.store(++head, std::memory_order_release);
    any_received = true;
  }
  if (any_received) ring_doorbell(source);
}

void PointToPoint::deliver(const MessagePtr& message, int source, const Cell& cell,
                           const char* payload, Messages& finished) try {
  message->source = source;
  if (cell.bytes != message->bytes || cell.dtype != message->dtype) {
    const auto& dtype_name = group_.info().dtype_name;
    const auto describe_tensor = [&](uint8_t dtype, uint64_t count) {
      return std::to_string(count) + " elements of " +
             (dtype_name ? dtype_name(dtype) : "dtype " + std::to_string(dtype));
    };
    const std::string failure =
        group_.format_rank(source) + " sent " + describe_tensor(cell.dtype, cell.count) +
        ", but the tensor to receive has " + describe_tensor(message->dtype, message->count);
    if (cell.ticket >= 0) close_ticket(source, cell, kRefused);
    finish(message, finished, failure);
    return;
  }
  if (cell.ticket < 0) {
    copy_bytes(message->data, payload, cell.bytes);
    finish(message, finished);
  } else if (copy_from_sender(message, source, cell, finished)) {
    close_ticket(source, cell, kConsumed);
    // If the group was aborted meanwhile, the sender may have released its memory.
    finish(message, finished, group_.is_aborted() ? group_.failure() : Failure());
  }
} catch (...) {
  posted_receives_.add(message->peer, message->tag, message);  // fails with all others
  throw;
}

// Copies a rendezvous message from the sender's memory. Returns false if it is left to the
// bounce buffer, at least in part.
bool PointToPoint::copy_from_sender(const MessagePtr& message, int source, const Cell& cell,
                                    Messages& finished) {
  auto& receives = bounce_receives_[static_cast<size_t>(source)];
  std::atomic<uint8_t>& ticket = channel(source, rank_).tickets[cell.ticket];
  uint8_t state = kOpen;
  BounceReceive receive{message, cell};
  if (ticket.compare_exchange_strong(state, kReading)) {
    if (peer_memory_.read_segment(cell, message->data)) return true;
    if (peer_memory_.may_read(source)) {
      // From pages of 2 MiB one rank alone reads faster than two copy.
      AutoTuner& tuner = read_tuners_[std::bit_width(cell.bytes)];
      const bool may_share =
          receives.empty() && count_pieces(cell.bytes) > 1 && !group_.is_oversubscribed();
      const auto begun = Clock::now();
      bool is_complete = true;
      if (may_share && tuner.choose() == 0)
        is_complete = copy_with_sender(receive, source, finished);
      else
        peer_memory_.read(source, cell.address, message->data, cell.bytes);
      if (may_share) tuner.record(std::chrono::duration<double>(Clock::now() - begun).count());
      if (is_complete) return true;
    }
    ticket.store(kOpen);
  }
  receives.push_back(receive);
  return false;
}

// How long a receiver waits for a piece from a sender that waits, too: several times as long
// as the copy of a piece takes.
constexpr std::chrono::microseconds kPatience{200};

// Copies a message with the help of its sender. Pieces that it sends arrive faster than this
// rank can read them; but if it does not wait, or is slow, this rank reads.
//
// Returns false if only pieces are missing that the sender has taken and not yet sent.
bool PointToPoint::copy_with_sender(BounceReceive& receive, int source, Messages& finished) {
  Channel& in = channel(source, rank_);
  const Cell& cell = receive.cell;
  const uint64_t pieces = count_pieces(cell.bytes), piece = group_.layout().bounce_bytes;
  begin_bounce(source, receive);
  bool is_patient = true;
  auto since = Clock::now();
  while (true) {
    const uint64_t received = receive.received;
    if (drain_bounce_buffer(source, receive)) return true;
    if (receive.received != received) since = Clock::now();
    const bool does_sender_wait =
        group_.rank_state(source).waiters.load(std::memory_order_relaxed) > 0;
    Claims claims = in.claims.load(std::memory_order_acquire);
    if (is_patient && does_sender_wait) {
      is_patient = Clock::now() - since < kPatience && !group_.is_aborted();
      // The sender may be waiting for the pieces of a message from here.
      for (int rank = 0; rank < size_; ++rank) send_to(rank, finished);
      cpu_pause();
      continue;
    }
    if (claims.taken() == pieces) return false;
    Claims more = claims;
    ++more.read;
    if (!in.claims.compare_exchange_strong(claims, more)) continue;
    const uint64_t offset = claims.read * piece;
    peer_memory_.read(source, cell.address + offset, receive.message->data + offset,
                      std::min(piece, cell.bytes - offset));
    since = Clock::now();
  }
}

uint64_t PointToPoint::count_pieces(uint64_t bytes) const {
  const uint64_t piece = group_.layout().bounce_bytes;
  return (bytes + piece - 1) / piece;
}

PointToPoint::Piece PointToPoint::piece_from_back(uint64_t number, uint64_t bytes) const {
  const uint64_t piece = group_.layout().bounce_bytes;
  const uint64_t offset = (count_pieces(bytes) - 1 - number) * piece;
  return {offset, std::min(piece, bytes - offset)};
}

void PointToPoint::close_ticket(int source, const Cell& cell, TicketState result) {
  // Acquire and release: the check for an aborted group that follows happens after all
  // that was read.
  channel(source, rank_).tickets[cell.ticket].exchange(result, std::memory_order_acq_rel);
  ring_doorbell(source);
}

void PointToPoint::receive_through_bounce_buffer(int source, Messages& finished) {
  auto& receives = bounce_receives_[static_cast<size_t>(source)];
  if (receives.empty()) return;
  BounceReceive& receive = receives.front();
  if (!receive.has_begun) begin_bounce(source, receive);
  if (!drain_bounce_buffer(source, receive)) return;
  close_ticket(source, receive.cell, kConsumed);
  finish(receive.message, finished);
  receives.pop_front();
}

// Lets the sender use the bounce buffer for this message.
void PointToPoint::begin_bounce(int source, BounceReceive& receive) {
  Claims claims;
  claims.ticket_plus_one = static_cast<uint64_t>(receive.cell.ticket) + 1;
  channel(source, rank_).claims.store(claims, std::memory_order_release);
  receive.has_begun = true;
  ring_doorbell(source);
}

// Receives the pieces that are in the bounce buffer. Returns whether the message is complete;
// then the next one may begin.
bool PointToPoint::drain_bounce_buffer(int source, BounceReceive& receive) {
  Channel& in = channel(source, rank_);
  Message& message = *receive.message;
  uint32_t drained = in.drained.load(std::memory_order_relaxed);
  while (drained != in.filled.load(std::memory_order_acquire)) {
    if (receive.received == count_pieces(message.bytes))
      throw CommError(group_.format_rank(source) + " wrote invalid sizes into shared memory");
    const Piece piece = piece_from_back(receive.received++, message.bytes);
    copy_bytes(message.data + piece.offset, bounce_buffer(source, rank_, drained), piece.bytes);
    in.drained.store(++drained, std::memory_order_release);
    ring_doorbell(source);
  }
  const Claims claims = in.claims.load(std::memory_order_acquire);
  if (claims.taken() < count_pieces(message.bytes) || receive.received < claims.sent) return false;
  in.claims.store({}, std::memory_order_release);
  return true;
}

// ---- sending ----

void PointToPoint::send_to(int target, Messages& finished) {
  const auto t = static_cast<size_t>(target);
  auto& sends = rendezvous_sends_[t];
  for (auto send = sends.begin(); send != sends.end();) {
    Message& message = **send;
    std::atomic<uint8_t>& ticket = channel(rank_, target).tickets[message.ticket];
    send_through_bounce_buffer(target, message);
    const uint8_t state = ticket.load(std::memory_order_acquire);
    if (state == kOpen || state == kReading) {
      ++send;
      continue;
    }
    ticket.store(kOpen, std::memory_order_relaxed);
    finish(*send, finished,
           state == kConsumed ? ""
                              : group_.format_rank(target) +
                                    " expects another size or dtype; see the error of that rank");
    send = sends.erase(send);
  }
  auto& pending = pending_sends_[t];
  while (!pending.empty() && start_send(pending.front(), finished)) pending.pop_front();
}

// Puts a message, or its announcement, into the channel. Returns false if there is no free
// cell or ticket.
bool PointToPoint::start_send(const MessagePtr& message, Messages& finished) {
  const int target = message->peer;
  const auto t = static_cast<size_t>(target);
  Cell new_cell;
  new_cell.tag = message->tag;
  new_cell.bytes = message->bytes;
  new_cell.count = message->count;
  new_cell.dtype = message->dtype;
  if (target == rank_) {
    if (const MessagePtr receive = posted_receives_.take(rank_, message->tag))
      deliver(receive, rank_, new_cell, message->data, finished);
    else
      unexpected_[t].add({new_cell, {message->data, message->data + message->bytes}});
    finish(message, finished);
    return true;
  }
  Channel& out = channel(rank_, target);
  const uint32_t tail = out.tail.load(std::memory_order_relaxed);
  if (tail - out.head.load(std::memory_order_acquire) >= group_.layout().cells) return false;
  Cell& shared_cell = cell(rank_, target, tail);
  if (message->bytes <= group_.layout().cell_bytes) {
    stream_bytes(payload(shared_cell), message->data, message->bytes);
    finish(message, finished);
  } else {
    std::vector<bool> is_used(kTickets, false);
    for (const MessagePtr& other : rendezvous_sends_[t])
      is_used[static_cast<size_t>(other->ticket)] = true;
    const auto free = std::find(is_used.begin(), is_used.end(), false);
    if (free == is_used.end()) return false;
    message->ticket = new_cell.ticket = static_cast<int32_t>(free - is_used.begin());
    new_cell.buffer = Heap::instance().find(message->data, message->bytes);
    new_cell.address = reinterpret_cast<uint64_t>(message->data);
    rendezvous_sends_[t].push_back(message);
  }
  shared_cell = new_cell;
  out.tail.store(tail + 1, std::memory_order_release);
  ring_doorbell(target);
  return true;
}

void PointToPoint::send_through_bounce_buffer(int target, Message& message) {
  Channel& out = channel(rank_, target);
  uint32_t filled = out.filled.load(std::memory_order_relaxed);
  while (filled - out.drained.load(std::memory_order_acquire) < 2) {
    Claims claims = out.claims.load(std::memory_order_acquire), more = claims;
    ++more.sent;
    if (!claims.belong_to(message.ticket) || claims.taken() == count_pieces(message.bytes)) return;
    if (!out.claims.compare_exchange_strong(claims, more)) continue;
    const Piece piece = piece_from_back(claims.sent, message.bytes);
    stream_bytes(bounce_buffer(rank_, target, filled), message.data + piece.offset, piece.bytes);
    out.filled.store(++filled, std::memory_order_release);
    ring_doorbell(target);
  }
}

// Makes sure that no rank reads the memory of a send from now on.
void PointToPoint::revoke_send(int target, const Message& message) {
  std::atomic<uint8_t>& ticket = channel(rank_, target).tickets[message.ticket];
  const auto until = Clock::now() + message.timeout;
  uint8_t state = kOpen;
  while (!ticket.compare_exchange_strong(state, kRevoked) && state == kReading) {
    // After an abort the receiver discards what it has read.
    if (group_.is_aborted() || check_health(group_.rank_state(target)) == Health::dead) return;
    if (Clock::now() > until)
      group_.abort(group_.format_rank(rank_) + " timed out after " +
                   format_seconds(message.timeout) + ", waiting for " + group_.format_rank(target) +
                   " to finish reading a message");
    state = kOpen;
    yield_core();
  }
}

}  // namespace lockstep
