// A channel carries the messages that one rank sends to another, in order.
//
//     sender                                     receiver
//     cells[tail % n] = {tag, bytes, payload}    finds it at head, copies it out
//     tail++, ring the bell            ───>      head++, ring the sender's bell
//
//     a long message: the cell only announces it, with a ticket
//       in a segment, or memory that may be read    the receiver copies it by itself
//       otherwise   granted = ticket    <───        through the lane, half by half:
//                   filled++            ───>        drained++
//       tickets[t] = taken              <───        the send is complete
//
// While the receiver copies out of the sender's memory the ticket says `taking`. A
// sender that goes takes back what is open, and waits out what is being taken: nobody
// ever reads memory that was given up.
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.h"

namespace lockstep {

constexpr int kTickets = 128;  // long messages on their way from one rank to another

enum Ticket : uint8_t {
  open_ticket,  // by the receiver:
  taking,       //   it copies; back to open where it may not read
  taken,
  refused,      //   it wants another size or dtype
  taken_back,   // by the sender, which has gone
};

struct Cell {
  int64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t count = 0;
  int32_t ticket = -1;  // of a long message
  uint8_t dtype = 0;
  Place place;          // where a long message lies,
  uint64_t address = 0;  // or its address in the sender's memory
};

struct Channel {
  alignas(kLine) std::atomic<uint32_t> tail{0};     // written by the sender
  std::atomic<uint32_t> filled{0};
  alignas(kLine) std::atomic<uint32_t> head{0};     // written by the receiver
  std::atomic<uint32_t> drained{0};
  std::atomic<uint32_t> granted{0};                 // ticket + 1 that may use the lane
  alignas(kLine) std::atomic<uint8_t> tickets[kTickets] = {};
  // then the cells, each with its payload, then the two halves of the lane
};

}  // namespace lockstep
