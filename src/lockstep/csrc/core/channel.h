// A channel carries the messages from one rank to another, in order.
//
//     sender                                     receiver
//     cells[tail % n] = {tag, bytes, payload}    finds it at head, copies it out
//     tail++, ring the receiver's doorbell ──>   head++, ring the sender's doorbell
//
//     a long message (rendezvous): the cell only announces it, with a ticket
//       in a segment, or in memory that the         the receiver copies it by itself
//       receiver may read
//       otherwise   granted = ticket      <──       through the bounce buffer, half by
//                   filled++              ──>       half:  drained++
//       tickets[t] = consumed             <──       the send is complete
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

struct Channel {
  alignas(kCacheLine) std::atomic<uint32_t> tail{0};  // written by the sender
  std::atomic<uint32_t> filled{0};
  alignas(kCacheLine) std::atomic<uint32_t> head{0};  // written by the receiver
  std::atomic<uint32_t> drained{0};
  std::atomic<uint32_t> granted{0};  // ticket + 1 that may use the bounce buffer
  alignas(kCacheLine) std::atomic<uint8_t> tickets[kTickets] = {};
  // then the cells, each with its payload, then the two halves of the bounce buffer
};

}  // namespace lockstep
