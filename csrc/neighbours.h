// Other processes' regions, mapped when they are first named. One a rank.
//
// An owner that gives a region back takes its memory from all who have it mapped,
// and with it the seal (segment.h): such mappings go when the next one comes. In a
// group that has failed they stay: another thread may still be in the middle of a
// call whose memory its owner has given back.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "layout.h"
#include "segment.h"

namespace lockstep {

class Neighbours {
 public:
  // `failed` is not 0 once the group is over.
  explicit Neighbours(const std::atomic<uint32_t>& failed) : failed_(failed) {}

  // The address here of `bytes` at a place; throws Failure if they lie outside. The
  // place may be in shared memory: this is a copy, which is checked and then used.
  char* at(Place place, uint64_t bytes);
  size_t mappings();

 private:
  struct Mapping {
    Segment segment;
    uint64_t used = 0;  // when, counted in uses
  };
  void make_room();

  const std::atomic<uint32_t>& failed_;
  std::mutex mutex_;
  std::map<std::pair<int32_t, Nonce>, Mapping> mapped_;
  uint64_t uses_ = 0;
};

}  // namespace lockstep
