// Tensors in shared memory, each in one place that other ranks can map.
//
// A process has one heap, whatever groups and ranks (threads) it has: regions of
// 64 MiB of addresses each, or larger for one larger tensor. A place (region, offset)
// means the same to every process.
//
//     region   | seal | block | hole | block | hole, warm | never had memory |
//                                                         ^ warm
//
// First touch is slow (0.3 GB/s), so a freed block keeps its memory for the next one,
// and so does a region without blocks, within a sixteenth of the memory that is left.
// Beyond that the one that has been idle longest goes back to the system; all of them
// go where memory would otherwise not suffice.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "headroom.h"
#include "layout.h"
#include "segment.h"

namespace lockstep {

class Heap {
 public:
  // The heap of this process; a forked child gets its own.
  static Heap& here();
  // `left` says how many bytes can still be had.
  explicit Heap(std::function<uint64_t()> left = [] { return headroom(); });

  // Memory for `bytes`, 64-byte aligned; throws Failure where there is not enough.
  void* allocate(uint64_t bytes);
  void free(void* data);
  // Where [data, data + bytes) lies; a private place if not in one block of this heap.
  Place find(const void* data, uint64_t bytes);
  uint64_t used();  // by blocks
  uint64_t idle();  // in regions without blocks

 private:
  using Spans = std::map<uint64_t, uint64_t>;  // offset -> bytes
  struct Region {
    Segment segment;
    Spans holes, blocks;
    uint64_t warm = 0;        // everything below has memory
    uint64_t idle_since = 0;  // counted in `idlings_`
    bool serves(uint64_t bytes) const;
    Spans::iterator hole_for(uint64_t bytes);
    void add_hole(uint64_t offset, uint64_t bytes);
  };
  void* reuse(uint64_t bytes);
  void* extend(uint64_t bytes);
  void* take(Region& region, Spans::iterator hole, uint64_t bytes);
  void rest(Region& region);
  bool trim(uint64_t most);
  uint64_t idle_bytes() const;
  Region* region_of(const void* data);

  const std::function<uint64_t()> left_;
  std::mutex mutex_;
  std::map<const char*, std::unique_ptr<Region>> regions_;  // by start
  std::atomic<const char*> low_{nullptr}, high_{nullptr};
  uint64_t used_ = 0, idlings_ = 0;
  uint64_t keeps_;  // this much may be idle before the memory that is left is asked for
};

}  // namespace lockstep
