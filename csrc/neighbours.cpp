#include "neighbours.h"

#include <algorithm>

#include "failure.h"

namespace lockstep {

// 64 regions of each of 64 ranks; the system's own limit is 65,530.
constexpr size_t kMappings = 4096;

char* Neighbours::at(Place place, uint64_t bytes) {
  if (place.offset > place.address.bytes || bytes > place.address.bytes - place.offset)
    throw Failure("a tensor in shared memory ends outside its region");
  const auto key = std::make_pair(place.address.pid, place.address.nonce);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = mapped_.find(key);
  if (found == mapped_.end()) {
    make_room();
    found = mapped_.emplace(key, Mapping{Segment::attach(place.address)}).first;
  }
  Mapping& mapping = found->second;
  if (mapping.segment.bytes() != place.address.bytes)
    throw Failure("a region of shared memory has changed its size");
  mapping.used = ++uses_;
  return mapping.segment.data() + place.offset;
}

size_t Neighbours::mappings() {
  std::lock_guard<std::mutex> lock(mutex_);
  return mapped_.size();
}

void Neighbours::make_room() {
  // What is given back is seen first: an owner that does so because the group has
  // failed has seen the failure before.
  std::vector<std::map<std::pair<int32_t, Nonce>, Mapping>::iterator> gone;
  for (auto entry = mapped_.begin(); entry != mapped_.end(); ++entry)
    if (entry->second.segment.dissolved()) gone.push_back(entry);
  if (failed_.load(std::memory_order_acquire) != 0) return;
  for (auto& entry : gone) mapped_.erase(entry);
  if (mapped_.size() < kMappings) return;
  mapped_.erase(std::min_element(
      mapped_.begin(), mapped_.end(),
      [](const auto& a, const auto& b) { return a.second.used < b.second.used; }));
}

}  // namespace lockstep
