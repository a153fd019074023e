// Moving messages along the channels: see mail.h for the ways they take. Everything
// here runs under the lock of the mail and returns at once.
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "failure.h"
#include "mail.h"
#include "reduce.h"

namespace lockstep {

static uint64_t lines(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// ---- where things lie ----

Channel& Mail::channel(int from, int to) {
  return *reinterpret_cast<Channel*>(group_.at(group_.layout().channel(from, to)));
}

Cell& Mail::cell(int from, int to, uint32_t number) {
  const Layout& layout = group_.layout();
  const uint64_t stride = lines(sizeof(Cell)) + lines(layout.cell_bytes);
  return *reinterpret_cast<Cell*>(group_.at(layout.channel(from, to) + lines(sizeof(Channel)) +
                                            number % layout.cells * stride));
}

char* Mail::payload(Cell& cell) { return reinterpret_cast<char*>(&cell) + lines(sizeof(Cell)); }

char* Mail::lane(int from, int to, uint32_t half) {
  const Layout& layout = group_.layout();
  return group_.at(layout.channel(from, to) + layout.channel_bytes() -
                   (2 - half % 2) * lines(layout.lane_bytes));
}

// ---- moving ----

void Mail::progress(Posts& over) {
  for (int rank = 0; rank < n_; ++rank) {
    receive_from(rank, over);
    stream_in(rank, over);
    send_to(rank, over);
  }
}

std::list<Post>::iterator Mail::matching(int source, int64_t tag) {
  return std::find_if(wanted_.begin(), wanted_.end(), [&](const Post& message) {
    return (message->peer < 0 || message->peer == source) && message->tag == tag;
  });
}

void Mail::receive_from(int source, Posts& over) {
  auto& arrived = arrived_[static_cast<size_t>(source)];
  for (auto early = arrived.begin(); early != arrived.end() && !wanted_.empty();) {
    const auto wanted = matching(source, early->cell.tag);
    if (wanted != wanted_.end()) {
      deliver(*wanted, source, early->cell, early->payload.data(), over);
      wanted_.erase(wanted);
      early = arrived.erase(early);
    } else {
      ++early;
    }
  }
  if (source == me_) return;
  Channel& in = channel(source, me_);
  uint32_t head = in.head.load(std::memory_order_relaxed);
  bool moved = false;
  while (head != in.tail.load(std::memory_order_acquire)) {
    Cell& place = cell(source, me_, head);
    const Cell next = place;  // once: what was checked is what is used
    const bool is_long = next.ticket >= 0;
    if (next.ticket >= kTickets || (!is_long && next.bytes > group_.layout().cell_bytes))
      throw Failure(group_.name_of(source) + " wrote impossible sizes into shared memory");
    const auto wanted = matching(source, next.tag);
    if (wanted != wanted_.end()) {
      deliver(*wanted, source, next, payload(place), over);
      wanted_.erase(wanted);
    } else {
      const char* data = payload(place);
      arrived.push_back({source, next, {data, data + (is_long ? 0 : next.bytes)}});
    }
    in.head.store(++head, std::memory_order_release);
    moved = true;
  }
  if (moved) group_.record(source).bell.ring();
}

void Mail::deliver(const Post& message, int source, const Cell& cell, const char* payload,
                   Posts& over) {
  message->source = source;
  if (cell.bytes != message->bytes || cell.dtype != message->dtype) {
    const auto& dtype = group_.naming().dtype;
    const auto said = [&](uint8_t type, uint64_t count) {
      return std::to_string(count) + " elements of " +
             (dtype ? dtype(type) : "dtype " + std::to_string(type));
    };
    std::string error = group_.name_of(source) + " sent " + said(cell.dtype, cell.count) +
                        ", but the tensor to receive has " + said(message->dtype, message->count);
    if (cell.ticket >= 0) close(source, cell, refused);
    finish(message, over, error);
    return;
  }
  if (cell.ticket < 0) {
    copy_bytes(message->data, payload, cell.bytes);
    finish(message, over);
  } else if (take(message, source, cell)) {
    close(source, cell, taken);
    // A group that ended meanwhile has made the sender give its memory up.
    finish(message, over, group_.aborted() ? group_.reason() : "");
  } else {
    streams_[static_cast<size_t>(source)].push_back({message, cell, false});
  }
}

// Copies a long message out of the sender's memory, where that is possible.
bool Mail::take(const Post& message, int source, const Cell& cell) {
  std::atomic<uint8_t>& ticket = channel(source, me_).tickets[cell.ticket];
  uint8_t state = open_ticket;
  if (!ticket.compare_exchange_strong(state, taking)) return false;
  if (read_shared(cell, message->data) || read_private(source, cell, message->data)) return true;
  ticket.store(open_ticket);
  return false;
}

bool Mail::read_shared(const Cell& cell, char* to) {
  if (!cell.place.shared()) return false;
  try {
    copy_bytes(to, group_.neighbours().at(cell.place, cell.bytes), cell.bytes);
    return true;
  } catch (const Failure&) {
    return false;  // no descriptor is free, or the sender has died: there are other ways
  }
}

static bool read_memory(int pid, uint64_t address, char* to, uint64_t bytes) {
  while (bytes > 0) {
    iovec local{to, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    to += got;
    address += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return true;
}

bool Mail::read_private(int source, const Cell& cell, char* to) {
  uint8_t& known = readable_[static_cast<size_t>(source)];
  Record& record = group_.record(source);
  if (known == 0) {
    // The kernel may forbid it, or the number may mean another process here.
    Nonce proof;
    known = read_memory(record.pid, record.proof_address, reinterpret_cast<char*>(&proof),
                        sizeof proof) && proof == record.proof ? 1 : 2;
  }
  return known == 1 && read_memory(record.pid, cell.address, to, cell.bytes);
}

void Mail::close(int source, const Cell& cell, Ticket result) {
  // Both ways: what follows (has the group ended?) is seen after all that was read.
  channel(source, me_).tickets[cell.ticket].exchange(result, std::memory_order_acq_rel);
  group_.record(source).bell.ring();
}

void Mail::stream_in(int source, Posts& over) {
  auto& streams = streams_[static_cast<size_t>(source)];
  if (streams.empty()) return;
  Stream& stream = streams.front();
  Channel& in = channel(source, me_);
  if (!stream.granted) {
    stream.granted = true;
    in.granted.store(static_cast<uint32_t>(stream.cell.ticket) + 1, std::memory_order_release);
    group_.record(source).bell.ring();
  }
  Message& message = *stream.message;
  const uint64_t half = group_.layout().lane_bytes;
  uint32_t drained = in.drained.load(std::memory_order_relaxed);
  while (message.moved < message.bytes && drained != in.filled.load(std::memory_order_acquire)) {
    const uint64_t bytes = std::min(half, message.bytes - message.moved);
    copy_bytes(message.data + message.moved, lane(source, me_, drained), bytes);
    message.moved += bytes;
    in.drained.store(++drained, std::memory_order_release);
    group_.record(source).bell.ring();
  }
  if (message.moved < message.bytes) return;
  in.granted.store(0, std::memory_order_release);
  close(source, stream.cell, taken);
  finish(stream.message, over);
  streams.pop_front();
}

void Mail::send_to(int target, Posts& over) {
  const auto t = static_cast<size_t>(target);
  auto& announced = announced_[t];
  for (auto sent = announced.begin(); sent != announced.end();) {
    Message& message = **sent;
    std::atomic<uint8_t>& ticket = channel(me_, target).tickets[message.ticket];
    stream_out(target, message);
    const uint8_t result = ticket.load(std::memory_order_acquire);
    if (result == open_ticket || result == taking) {
      ++sent;
      continue;
    }
    ticket.store(open_ticket, std::memory_order_relaxed);
    finish(*sent, over,
           result == taken ? ""
                           : group_.name_of(target) +
                                 " wants another size or dtype; its own error says which");
    sent = announced.erase(sent);
  }
  auto& waiting = waiting_[t];
  while (!waiting.empty() && announce(waiting.front(), over)) waiting.pop_front();
}

bool Mail::announce(const Post& message, Posts& over) {
  const int target = message->peer;
  const auto t = static_cast<size_t>(target);
  Cell fresh;
  fresh.tag = message->tag;
  fresh.bytes = message->bytes;
  fresh.count = message->count;
  fresh.dtype = message->dtype;
  if (target == me_) {
    arrived_[t].push_back({me_, fresh, std::vector<char>(message->data, message->data + message->bytes)});
    finish(message, over);
    receive_from(me_, over);
    return true;
  }
  Channel& out = channel(me_, target);
  const uint32_t tail = out.tail.load(std::memory_order_relaxed);
  if (tail - out.head.load(std::memory_order_acquire) >= group_.layout().cells) return false;
  Cell& place = cell(me_, target, tail);
  if (message->bytes <= group_.layout().cell_bytes) {
    stream_bytes(payload(place), message->data, message->bytes);
    finish(message, over);
  } else {
    std::vector<bool> used(kTickets, false);
    for (const Post& other : announced_[t]) used[static_cast<size_t>(other->ticket)] = true;
    const auto free = std::find(used.begin(), used.end(), false);
    if (free == used.end()) return false;
    message->ticket = fresh.ticket = static_cast<int32_t>(free - used.begin());
    fresh.place = Heap::here().find(message->data, message->bytes);
    fresh.address = reinterpret_cast<uint64_t>(message->data);
    announced_[t].push_back(message);
  }
  place = fresh;
  out.tail.store(tail + 1, std::memory_order_release);
  group_.record(target).bell.ring();
  return true;
}

// Makes sure that nobody reads the memory of a send from now on.
void Mail::take_back(int target, const Message& message) {
  std::atomic<uint8_t>& ticket = channel(me_, target).tickets[message.ticket];
  const auto until = Clock::now() + message.timeout;
  uint8_t state = open_ticket;
  while (!ticket.compare_exchange_strong(state, taken_back) && state == taking) {
    // After an abort a receiver does not trust what it has read.
    if (group_.aborted() || health(group_.record(target)) == Health::dead) return;
    if (Clock::now() > until)
      group_.abort(group_.name_of(me_) + " waited " + seconds(message.timeout) + " for " +
                   group_.name_of(target) + " to finish reading a message");
    state = open_ticket;
    yield_core();
  }
}

void Mail::stream_out(int target, Message& message) {
  Channel& out = channel(me_, target);
  if (out.granted.load(std::memory_order_acquire) != static_cast<uint32_t>(message.ticket) + 1)
    return;
  const uint64_t half = group_.layout().lane_bytes;
  uint32_t filled = out.filled.load(std::memory_order_relaxed);
  while (message.moved < message.bytes &&
         filled - out.drained.load(std::memory_order_acquire) < 2) {
    const uint64_t bytes = std::min(half, message.bytes - message.moved);
    stream_bytes(lane(me_, target, filled), message.data + message.moved, bytes);
    message.moved += bytes;
    out.filled.store(++filled, std::memory_order_release);
    group_.record(target).bell.ring();
  }
}

}  // namespace lockstep
