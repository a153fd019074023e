// A channel carries the messages from one rank to another, in order.
//
//     sender                                     receiver
//     cells[tail % n] = {tag, bytes, payload}    finds it at head, copies it out
//     tail++, ring the receiver's doorbell ──>   head++, ring the sender's doorbell
//
//     a long message (rendezvous): the cell only announces it, with a ticket
//       in a segment                                the receiver copies it by itself
//       otherwise   claims = ticket       <──       the bounce buffer is this message's
//                   filled++              ──>       piece by piece:  drained++
//       tickets[t] = consumed             <──       the send is complete
//
// The message passes in pieces of half a bounce buffer. The sender sends them from the back;
// meanwhile a receiver that may read the sender's memory reads them from the front, unless
// the next one is about to arrive:
//
//     | read | read | read | ....... unclaimed ....... | sent | sent |
//
// While the receiver copies from the sender's memory the ticket is `kReading`. A sender
// that leaves revokes its open tickets and waits for those that are being read, so nobody
// ever reads memory that the sender has released.
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.h"

namespace lockstep {

constexpr int kTickets = 128;  // long messages in flight from one rank to another

enum TicketState : uint8_t {
  kOpen,      // set by the sender
  kReading,   // by the receiver, which copies; back to kOpen if it may not read
  kConsumed,  // by the receiver
  kRefused,   // by the receiver: its tensor has another size or dtype
  kRevoked,   // by the sender, which leaves
};

struct Cell {
  int64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t count = 0;
  int32_t ticket = -1;  // of a long message
  uint8_t dtype = 0;
  BufferHandle buffer;   // of a long message in a segment
  uint64_t address = 0;  // of a long message in the sender's private memory
};

// Which pieces of the message with a ticket are taken, in one word: so a sender never takes
// a piece of a later message.
struct Claims {
  uint64_t ticket_plus_one : 8 = 0;  // 0: no message uses the bounce buffer
  uint64_t read : 28 = 0;            // pieces at the front, by the receiver
  uint64_t sent : 28 = 0;            // pieces at the back, by the sender

  bool belong_to(int ticket) const { return ticket_plus_one == static_cast<uint64_t>(ticket) + 1; }
  uint64_t taken() const { return read + sent; }
};
static_assert(std::atomic<Claims>::is_always_lock_free);
static_assert(kTickets < 1 << 8);

struct Channel {
  alignas(kCacheLine) std::atomic<uint32_t> tail{0};  // written by the sender
  std::atomic<uint32_t> filled{0};
  alignas(kCacheLine) std::atomic<uint32_t> head{0};  // written by the receiver
  std::atomic<uint32_t> drained{0};
  alignas(kCacheLine) std::atomic<Claims> claims{};  // begun and ended by the receiver
  alignas(kCacheLine) std::atomic<uint8_t> tickets[kTickets] = {};
  // then the cells, each with its payload, then the two halves of the bounce buffer
};

}  // namespace lockstep
