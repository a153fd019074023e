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

void Mail::progress(std::vector<Post>& done) {
  for (int rank = 0; rank < n_; ++rank) {
    receive_from(rank, done);
    stream_in(rank, done);
    send_to(rank, done);
  }
}

Post Mail::matching(int source, int64_t tag) {
  for (auto wanted = wanted_.begin(); wanted != wanted_.end(); ++wanted) {
    Message& message = **wanted;
    if ((message.peer >= 0 && message.peer != source) || message.tag != tag) continue;
    Post found = *wanted;
    wanted_.erase(wanted);
    return found;
  }
  return nullptr;
}

void Mail::receive_from(int source, std::vector<Post>& done) {
  auto& arrived = arrived_[static_cast<size_t>(source)];
  for (auto early = arrived.begin(); early != arrived.end() && !wanted_.empty();) {
    if (Post message = matching(source, early->cell.tag)) {
      deliver(message, source, early->cell, early->payload.data(), done);
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
    Cell& next = cell(source, me_, head);
    const bool is_long = next.ticket >= 0;
    if (next.ticket >= kTickets || (!is_long && next.bytes > group_.layout().cell_bytes))
      throw Failure(group_.name_of(source) + " wrote impossible sizes into shared memory");
    if (Post message = matching(source, next.tag))
      deliver(message, source, next, payload(next), done);
    else
      arrived.push_back({source, next,
                         is_long ? std::vector<char>()
                                 : std::vector<char>(payload(next), payload(next) + next.bytes)});
    in.head.store(++head, std::memory_order_release);
    moved = true;
  }
  if (moved) group_.record(source).bell.ring();
}

void Mail::deliver(const Post& message, int source, const Cell& cell, const char* payload,
                   std::vector<Post>& done) {
  message->source = source;
  if (cell.bytes != message->bytes || cell.dtype != message->dtype) {
    const auto& dtype = group_.naming().dtype;
    const auto said = [&](uint8_t type, uint64_t count) {
      return std::to_string(count) + " elements of " +
             (dtype ? dtype(type) : "dtype " + std::to_string(type));
    };
    std::string error = group_.name_of(source) + " sent " + said(cell.dtype, cell.count) +
                        ", but the tensor to receive has " + said(message->dtype, message->count);
    if (cell.ticket >= 0) close(source, cell, 2);
    finish(message, done, std::move(error));
    return;
  }
  if (cell.ticket < 0) {
    copy_bytes(message->data, payload, cell.bytes);
    finish(message, done);
  } else if (take(message, source, cell)) {
    close(source, cell, 1);
    finish(message, done);
  } else {
    streams_[static_cast<size_t>(source)].push_back({message, cell, false});
  }
}

// Copies a long message out of the sender's memory, where that is possible.
bool Mail::take(const Post& message, int source, const Cell& cell) {
  if (cell.place.shared()) {
    copy_bytes(message->data, group_.neighbours().at(cell.place, cell.bytes), cell.bytes);
    return true;
  }
  return read_private(source, cell, message->data);
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

void Mail::close(int source, const Cell& cell, uint8_t result) {
  channel(source, me_).tickets[cell.ticket].store(result, std::memory_order_release);
  group_.record(source).bell.ring();
}

void Mail::stream_in(int source, std::vector<Post>& done) {
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
  close(source, stream.cell, 1);
  finish(stream.message, done);
  streams.pop_front();
}

void Mail::send_to(int target, std::vector<Post>& done) {
  const auto t = static_cast<size_t>(target);
  auto& announced = announced_[t];
  for (auto sent = announced.begin(); sent != announced.end();) {
    Message& message = **sent;
    std::atomic<uint8_t>& ticket = channel(me_, target).tickets[message.ticket];
    stream_out(target, message);
    const uint8_t result = ticket.load(std::memory_order_acquire);
    if (result == 0) {
      ++sent;
      continue;
    }
    ticket.store(0, std::memory_order_relaxed);
    finish(*sent, done, result == 1 ? "" : group_.name_of(target) +
                                               " wants another size or dtype; its own error says which");
    sent = announced.erase(sent);
  }
  auto& waiting = waiting_[t];
  while (!waiting.empty() && announce(waiting.front(), done)) waiting.pop_front();
}

bool Mail::announce(const Post& message, std::vector<Post>& done) {
  const int target = message->peer;
  const auto t = static_cast<size_t>(target);
  Cell fresh;
  fresh.tag = message->tag;
  fresh.bytes = message->bytes;
  fresh.count = message->count;
  fresh.dtype = message->dtype;
  if (target == me_) {
    arrived_[t].push_back({me_, fresh, std::vector<char>(message->data, message->data + message->bytes)});
    finish(message, done);
    receive_from(me_, done);
    return true;
  }
  Channel& out = channel(me_, target);
  const uint32_t tail = out.tail.load(std::memory_order_relaxed);
  if (tail - out.head.load(std::memory_order_acquire) >= group_.layout().cells) return false;
  Cell& place = cell(me_, target, tail);
  if (message->bytes <= group_.layout().cell_bytes) {
    stream_bytes(payload(place), message->data, message->bytes);
    finish(message, done);
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
