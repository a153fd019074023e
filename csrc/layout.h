// What lies where in the segment of a group.
//
//     | Header | record 0 | record 1 | ... | slots | stages | channels |
//
//     record r    what rank r says about itself; only rank r writes it, except
//                 `asked`, and its lock, which the kernel marks when r dies
//     slot r, p   two a rank (parity of the call): small messages and tables
//     stage r, b  three a rank: pieces of messages that lie in private memory
//     channel     one for each ordered pair of ranks (channel.h)
//
// Sizes come from the header, which rank 0 writes before anybody attaches; every
// rank computes the offsets from them and checks them against the segment's size.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "segment.h"
#include "sync.h"

namespace lockstep {

constexpr int kMaxRanks = 64;
constexpr uint64_t kText = 512;  // bytes of a sentence in shared memory

// Where a buffer lies: nowhere that others can reach, or in a segment.
struct Place {
  Address address;  // pid 0: private
  uint64_t offset = 0;
  bool shared() const { return address.pid != 0; }
};

// Through the slot of the call, from its place in a segment, or through the stages.
enum class Route : uint8_t { slot, direct, staged };

enum class Op : uint8_t {
  none, barrier, broadcast, all_reduce, reduce, all_gather, gather, scatter, reduce_scatter,
  all_to_all, exact_sum, share, send, recv,
};

// What a rank says about its call; the others compare it with their own.
struct Call {
  Op op = Op::none;
  uint8_t dtype = 0;      // c10::ScalarType, compared and printed only
  uint8_t reduction = 0;  // Reduction
  uint8_t uneven = 0;     // counts may differ: the tables in the slots are compared
  Route route = Route::slot;  // how others get at this rank's message
  int32_t root = -1;
  uint64_t count = 0;     // elements
  double factor = 1;      // of a premultiplied sum
  uint64_t plan = 0;      // what else must be alike, as one number (exact sum)
  Place place;            // of the tensor, where it lies in a segment
  Place second;           // of the result (exact sum)

  bool agrees(const Call& other) const {
    return op == other.op && dtype == other.dtype && reduction == other.reduction &&
           root == other.root && uneven == other.uneven && (uneven || count == other.count) &&
           plan == other.plan;
  }
};

enum class State : uint32_t { absent, here, left };

struct alignas(4096) Record {
  Flag step;    // how far this rank has come; counts phases of calls
  Flag bell;    // rung by others when a channel of this rank has news
  alignas(kLine) Call calls[2];
  alignas(kLine) pthread_mutex_t lock;  // robust; held as long as this rank lives
  std::atomic<State> state{State::absent};
  std::atomic<int32_t> pid{0};        // whoever sets it first is this rank
  std::atomic<uint32_t> asked{0};     // "where are you?": futex of the keeper
  std::atomic<uint32_t> answered{0};  // the last question that `site` answers
  alignas(kLine) std::atomic<uint32_t> calls_begun{0};  // collectives, for messages
  std::atomic<uint32_t> last_op{0};
  std::atomic<uint64_t> cores[kCoreWords] = {};  // that this rank may run on
  uint64_t proof_address = 0;  // of `proof` in this process's private memory
  Nonce proof;
  char site[kText] = {};  // this rank's answer, or its side of a disagreement
};

struct Header {
  Seal seal;
  uint32_t ranks = 0;
  uint32_t cells = 0;         // of a channel
  uint64_t slot_bytes = 0;
  uint64_t stage_bytes = 0;
  uint64_t cell_bytes = 0;    // payload of one cell
  uint64_t lane_bytes = 0;    // half of a channel's lane
  alignas(kLine) std::atomic<uint32_t> aborted{0};  // 0, 1 being written, 2 text is there
  char text[kText] = {};
};

// Offsets, from the sizes in a header.
struct Layout {
  uint32_t ranks = 0, cells = 0;
  uint64_t slot_bytes = 0, stage_bytes = 0, cell_bytes = 0, lane_bytes = 0;

  static Layout chosen(int ranks);       // sizes for so many ranks, and LOCKSTEP_*_BYTES
  static Layout read(const Header& header, uint64_t bytes);  // throws Failure if impossible
  void write(Header& header) const;

  uint64_t record(int rank) const;
  uint64_t slot(int rank, int parity) const;
  uint64_t stage(int rank, int buffer) const;
  uint64_t channel(int from, int to) const;
  uint64_t channel_bytes() const;
  uint64_t total() const;

 private:
  uint64_t least_slot() const;
  bool possible() const;
};

}  // namespace lockstep
