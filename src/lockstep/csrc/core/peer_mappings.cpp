#include "peer_mappings.h"

#include <algorithm>

#include "errors.h"

namespace lockstep {

// 64 regions of each of 64 ranks; Linux allows 65,530 mappings by default.
constexpr size_t kMappings = 4096;

char* PeerMappings::map(BufferHandle buffer, uint64_t bytes) { return hold(buffer, bytes).get(); }

std::shared_ptr<char> PeerMappings::hold(BufferHandle buffer, uint64_t bytes) {
  if (buffer.offset > buffer.segment.bytes || bytes > buffer.segment.bytes - buffer.offset)
    throw CommError("a tensor in shared memory ends outside its region");
  const auto key = std::make_pair(buffer.segment.pid, buffer.segment.nonce);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = mappings_.find(key);
  if (found == mappings_.end()) {
    evict();
    auto segment = std::make_shared<Segment>(Segment::attach(buffer.segment));
    found = mappings_.emplace(key, Mapping{std::move(segment)}).first;
  }
  Mapping& mapping = found->second;
  if (mapping.segment->bytes() != buffer.segment.bytes)
    throw CommError("a region of shared memory has changed its size");
  mapping.last_use = ++uses_;
  return {mapping.segment, mapping.segment->data() + buffer.offset};
}

size_t PeerMappings::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return mappings_.size();
}

void PeerMappings::evict() {
  // Look for released segments before reading the flag: an owner that releases memory
  // because the group was aborted has set the flag before.
  std::vector<std::map<std::pair<int32_t, Nonce>, Mapping>::iterator> released;
  for (auto entry = mappings_.begin(); entry != mappings_.end(); ++entry)
    if (entry->second.segment->is_released()) released.push_back(entry);
  if (aborted_.load(std::memory_order_acquire) != 0) return;
  for (auto& entry : released) mappings_.erase(entry);
  if (mappings_.size() < kMappings) return;
  mappings_.erase(std::min_element(
      mappings_.begin(), mappings_.end(),
      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; }));
}

}  // namespace lockstep
