// Tensors in shared memory, and finding those of other ranks.
//
// A process has one heap, whatever groups and ranks (threads) it has: regions of
// 64 MiB of addresses each, or larger for one larger tensor. Memory is reserved
// block by block and reused: first touch is slow (0.3 GB/s), so a freed block
// stays. A place (region, offset) means the same to every process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.h"
#include "segment.h"

namespace lockstep {

class Heap {
 public:
  // The heap of this process; a forked child gets its own.
  static Heap& here();

  // Memory for `bytes`, 64-byte aligned; throws Failure where there is not enough.
  void* allocate(uint64_t bytes);
  void free(void* data);
  // Where [data, data + bytes) lies; a private place if not in one block of this heap.
  Place find(const void* data, uint64_t bytes);
  uint64_t used() const { return used_; }

 private:
  struct Region {
    Segment segment;
    std::map<uint64_t, uint64_t> holes;   // offset -> bytes
    std::map<uint64_t, uint64_t> blocks;  // offset -> bytes
    uint64_t warm = 0;                    // everything below has memory
  };
  void* take(Region& region, uint64_t bytes);
  Region* region_of(const void* data);

  std::mutex mutex_;
  std::map<const char*, std::unique_ptr<Region>> regions_;  // by start
  std::atomic<const char*> low_{nullptr}, high_{nullptr};
  uint64_t used_ = 0;
};

// Other processes' regions, mapped when they are first named. One a rank.
class Neighbours {
 public:
  // The address here of `bytes` at a place; throws Failure if they lie outside.
  char* at(const Place& place, uint64_t bytes);

 private:
  std::mutex mutex_;
  std::map<std::pair<int32_t, Nonce>, std::pair<Segment, uint64_t>> mapped_;  // and last use
  uint64_t uses_ = 0;
};

}  // namespace lockstep
