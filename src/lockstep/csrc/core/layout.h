// The layout of a group's segment.
//
//     | GroupHeader | state 0 | state 1 | ... | slots | staging buffers | channels |
//
//     state r       what rank r publishes about itself (RankState). Only rank r writes
//                   it, except `location_requests`, the doorbell and the lock, which
//                   the kernel marks when r dies
//     slot r, p     two per rank (parity of the call): short messages and tables
//     staging r, b  three per rank: pieces of messages that are in private memory
//     channel       one per ordered pair of ranks (channel.h)
//
// The sizes are in the header, which rank 0 writes before any rank attaches. Every rank
// computes the offsets from them and checks them against the size of the segment.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "errors.h"
#include "segment.h"
#include "sync.h"

namespace lockstep {

constexpr int kMaxRanks = 64;
constexpr uint64_t kTextBytes = 512;  // of an error message in shared memory

// Where a buffer is: in private memory, or at an offset of a segment that other ranks
// can map.
struct BufferHandle {
  SegmentHandle segment;  // pid 0: private memory
  uint64_t offset = 0;
  bool is_shared() const { return segment.pid != 0; }
};

// How other ranks read a rank's message: from its slot, directly from the buffer, which
// is in a segment, or in pieces from its staging buffers.
enum class Route : uint8_t { slot, direct, staged };

enum class Op : uint8_t {
  none,
  barrier,
  broadcast,
  all_reduce,
  reduce,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  reproducible_all_reduce,
  share,
  send,
  recv,
  all_gather_bytes,
};

// What the tensors of a call are; those of other kinds than `dense` are not in memory that the core
// reads.
enum class TensorKind : uint8_t { dense, sparse, on_device };

// What a rank publishes about its call; the other ranks compare it with their own.
struct CallInfo {
  Op op = Op::none;
  uint8_t dtype = 0;      // c10::ScalarType, only compared and printed
  uint8_t reduction = 0;  // Reduction
  uint8_t uneven = 0;     // 1: counts may differ; the tables in the slots are compared
  TensorKind kind = TensorKind::dense;
  Route route = Route::slot;  // to this rank's message
  int32_t root = -1;
  uint64_t count = 0;        // elements
  double factor = 1;         // of PREMUL_SUM
  uint64_t plan_digest = 0;  // a hash of everything else that must match (reproducible all-reduce)
  BufferHandle buffer;       // the tensor
  BufferHandle result;       // the result (reproducible all-reduce)

  bool matches(const CallInfo& other) const {
    return op == other.op && dtype == other.dtype && reduction == other.reduction &&
           kind == other.kind && root == other.root && uneven == other.uneven &&
           (uneven || count == other.count) && plan_digest == other.plan_digest;
  }
};

enum class Membership : uint32_t { absent, joined, left };

struct alignas(4096) RankState {
  Flag phase;     // phases of collective calls that this rank has reached
  Flag doorbell;  // incremented by other ranks when a channel of this rank has changed
  alignas(kCacheLine) std::atomic<uint32_t> waiters{0};  // threads that wait for a message
  alignas(kCacheLine) CallInfo calls[2];
  alignas(kCacheLine) pthread_mutex_t lock;  // robust; held as long as this rank lives
  std::atomic<Membership> membership{Membership::absent};
  std::atomic<int32_t> pid{0};  // set by compare-and-swap: a second process is refused
  std::atomic<uint32_t> location_requests{0};                // futex of the liveness thread
  std::atomic<uint32_t> location_answers{0};                 // the last request that `text` answers
  alignas(kCacheLine) std::atomic<uint32_t> calls_begun{0};  // for error messages
  std::atomic<uint32_t> last_op{0};                          // for error messages
  std::atomic<uint64_t> cores[kCoreMaskWords] = {};          // that this rank may run on
  uint64_t probe_address = 0;  // of a copy of `probe` in this process's private memory
  Nonce probe;
  char text[kTextBytes] = {};  // this rank's location, or its call in a mismatch
};

struct GroupHeader {
  SegmentHeader segment;
  uint32_t ranks = 0;
  uint32_t cells = 0;  // of one channel
  uint64_t slot_bytes = 0;
  uint64_t staging_bytes = 0;
  uint64_t cell_bytes = 0;                               // payload of one cell
  uint64_t bounce_bytes = 0;                             // half of a channel's bounce buffer
  alignas(kCacheLine) std::atomic<uint32_t> aborted{0};  // 1: `text` is being written; 2: done
  Loss loss = Loss::none;                                // of rank `lost`, if one is lost
  int32_t lost = -1;
  char text[kTextBytes] = {};  // the reason
  char hint[kTextBytes] = {};
};

// Returns the bytes of the last-level cache; LOCKSTEP_CACHE_BYTES overrides them.
uint64_t last_level_cache_bytes();

// The sizes in a header, and the offsets that follow from them.
struct Layout {
  uint32_t ranks = 0, cells = 0;
  uint64_t slot_bytes = 0, staging_bytes = 0, cell_bytes = 0, bounce_bytes = 0;

  // Chooses sizes for a number of ranks; LOCKSTEP_*_BYTES override them.
  static Layout choose(int ranks);
  // Throws CommError if the sizes are invalid or need more than `bytes`.
  static Layout read(const GroupHeader& header, uint64_t bytes);
  void write(GroupHeader& header) const;

  uint64_t rank_state(int rank) const;
  uint64_t slot(int rank, int parity) const;
  uint64_t staging_buffer(int rank, int buffer) const;
  uint64_t channel(int from, int to) const;
  uint64_t channel_bytes() const;
  uint64_t total() const;

 private:
  uint64_t min_slot_bytes() const;
  bool is_valid() const;
};

}  // namespace lockstep
