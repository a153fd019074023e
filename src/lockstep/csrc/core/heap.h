// Tensors in shared memory, which other ranks can map.
//
// A process has one heap, for any number of groups and ranks (threads): regions of 64 MiB
// of addresses each, or larger for one larger tensor. A handle (region, offset) means the
// same in every process.
//
//     region   | header | block | hole | block | hole | without memory yet |
//                                                     ^ committed
//
// The first touch of memory is slow (0.3 GB/s), so a freed block keeps its memory for the
// next one, and so does a region without blocks, up to a sixteenth of the available
// memory. Beyond that, the region that has been idle longest is returned to the system;
// all idle regions are before an allocation fails.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "available_memory.h"
#include "layout.h"
#include "segment.h"

namespace lockstep {

class Heap {
 public:
  // The heap of this process; a forked child gets its own.
  static Heap& instance();
  // `available` returns the bytes that this process can still get.
  explicit Heap(std::function<uint64_t()> available = [] { return available_memory(); });

  // Returns `bytes` of memory, 64-byte aligned. Throws CommError if there is not enough.
  void* allocate(uint64_t bytes);
  void free(void* data);
  // Returns the handle of [data, data + bytes), or one of private memory if the range is
  // not in one block of this heap.
  BufferHandle find(const void* data, uint64_t bytes);
  uint64_t used_bytes();  // in blocks
  uint64_t idle_bytes();  // in regions without blocks

 private:
  using Spans = std::map<uint64_t, uint64_t>;  // offset -> bytes
  struct Region {
    Segment segment;
    Spans holes, blocks;
    uint64_t committed = 0;   // everything below has memory
    uint64_t idle_since = 0;  // counted in `idle_events_`
    bool is_suitable(uint64_t bytes) const;
    Spans::iterator find_hole(uint64_t bytes);
    void add_hole(uint64_t offset, uint64_t bytes);
  };
  void* reuse(uint64_t bytes);
  void* add_region(uint64_t bytes);
  void* claim(Region& region, Spans::iterator hole, uint64_t bytes);
  void mark_idle(Region& region);
  bool trim(uint64_t limit);
  uint64_t count_idle_bytes() const;
  Region* find_region(const void* data);

  const std::function<uint64_t()> available_;
  std::mutex mutex_;
  std::map<const char*, std::unique_ptr<Region>> regions_;  // by start address
  std::atomic<const char*> lowest_{nullptr}, highest_{nullptr};
  uint64_t used_ = 0, idle_events_ = 0;
  uint64_t idle_limit_;  // idle bytes allowed before the available memory is queried again
};

}  // namespace lockstep
