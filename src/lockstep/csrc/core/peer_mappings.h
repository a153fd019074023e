// The heap regions of other processes that this rank has mapped, each on first use.
//
// An owner that releases a region removes its memory for every process that maps it, and
// with it the segment's header (segment.h). Such mappings are removed when the next one
// is added. In an aborted group they stay: another thread may still be in the middle of
// a call that uses memory its owner has released.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "layout.h"
#include "segment.h"

namespace lockstep {

class PeerMappings {
 public:
  // `aborted` is not 0 once the group was aborted.
  explicit PeerMappings(const std::atomic<uint32_t>& aborted) : aborted_(aborted) {}

  // Returns the local address of a buffer of `bytes`; throws CommError if it ends outside
  // its region. The handle may come from shared memory, so it is taken by value: what is
  // checked is what is used.
  char* map(BufferHandle buffer, uint64_t bytes);
  // The same memory, mapped at least as long as the result exists. If a call has mapped the
  // region before, its owner may have died since.
  std::shared_ptr<char> hold(BufferHandle buffer, uint64_t bytes);
  size_t size();

 private:
  struct Mapping {
    std::shared_ptr<Segment> segment;
    uint64_t last_use = 0;
  };
  void evict();

  const std::atomic<uint32_t>& aborted_;
  std::mutex mutex_;
  std::map<std::pair<int32_t, Nonce>, Mapping> mappings_;
  uint64_t uses_ = 0;
};

}  // namespace lockstep
