#include "heap.h"

#include <unistd.h>

#include <algorithm>

#include "failure.h"

namespace lockstep {

constexpr uint64_t kRegion = uint64_t{64} << 20;
constexpr uint64_t kFirst = 4096;  // the seal has the first page
constexpr size_t kMappings = 256;  // of other processes, kept by one rank

Heap& Heap::here() {
  static std::mutex guard;
  static Heap* heap = nullptr;  // never destroyed: tensors may outlive everything else
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(guard);
  if (owner != getpid()) {
    // A forked child's regions would be its parent's: it starts anew.
    heap = new Heap;
    owner = getpid();
  }
  return *heap;
}

void* Heap::allocate(uint64_t bytes) {
  bytes = std::max<uint64_t>((bytes + kLine - 1) / kLine * kLine, kLine);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& entry : regions_)
    if (void* data = take(*entry.second, bytes)) return data;
  auto region = std::make_unique<Region>();
  const uint64_t size = std::max(kRegion, bytes + kFirst);
  region->segment = Segment::create("lockstep-heap", size, kFirst);
  region->holes[kFirst] = region->segment.bytes() - kFirst;
  void* data = take(*region, bytes);
  const char* start = region->segment.data();
  const char* end = start + region->segment.bytes();
  if (!low_.load() || start < low_.load()) low_ = start;
  if (end > high_.load()) high_ = end;
  regions_.emplace(start, std::move(region));
  return data;
}

void* Heap::take(Region& region, uint64_t bytes) {
  auto best = region.holes.end();
  for (auto hole = region.holes.begin(); hole != region.holes.end(); ++hole)
    if (hole->second >= bytes && (best == region.holes.end() || hole->second < best->second))
      best = hole;
  if (best == region.holes.end()) return nullptr;
  const auto [offset, room] = *best;
  // Memory below the mark was reserved and touched before: holes stay warm.
  const uint64_t end = offset + bytes, cold = std::max(offset, region.warm);
  if (cold < end) {
    region.segment.reserve(cold, end - cold);
    region.segment.prefault(cold, end - cold);
    region.warm = end;
  }
  region.holes.erase(best);
  if (room > bytes) region.holes[offset + bytes] = room - bytes;
  region.blocks[offset] = bytes;
  used_ += bytes;
  return region.segment.data() + offset;
}

Heap::Region* Heap::region_of(const void* data) {
  const char* address = static_cast<const char*>(data);
  auto entry = regions_.upper_bound(address);
  if (entry == regions_.begin()) return nullptr;
  --entry;
  Region& region = *entry->second;
  return address < entry->first + region.segment.bytes() ? &region : nullptr;
}

void Heap::free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Region* region = region_of(data);
  if (!region) return;
  const uint64_t offset = static_cast<uint64_t>(static_cast<char*>(data) - region->segment.data());
  auto block = region->blocks.find(offset);
  if (block == region->blocks.end()) return;
  uint64_t start = offset, bytes = block->second;
  used_ -= bytes;
  region->blocks.erase(block);
  auto after = region->holes.lower_bound(start);
  if (after != region->holes.end() && after->first == start + bytes) {
    bytes += after->second;
    after = region->holes.erase(after);
  }
  if (after != region->holes.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      start = before->first;
      bytes += before->second;
      region->holes.erase(before);
    }
  }
  region->holes[start] = bytes;
  // One tensor's own region goes back to the system, others are kept warm.
  if (region->blocks.empty() && region->segment.bytes() > kRegion)
    regions_.erase(region->segment.data());
}

Place Heap::find(const void* data, uint64_t bytes) {
  const char* address = static_cast<const char*>(data);
  if (address < low_.load(std::memory_order_relaxed) ||
      address >= high_.load(std::memory_order_relaxed))
    return {};
  std::lock_guard<std::mutex> lock(mutex_);
  Region* region = region_of(data);
  if (!region) return {};
  const uint64_t offset = static_cast<uint64_t>(address - region->segment.data());
  auto block = region->blocks.upper_bound(offset);
  if (block == region->blocks.begin()) return {};
  --block;
  if (offset + bytes > block->first + block->second) return {};
  return {region->segment.address(), offset};
}

char* Neighbours::at(const Place& place, uint64_t bytes) {
  if (place.offset > place.address.bytes || bytes > place.address.bytes - place.offset)
    throw Failure("a tensor in shared memory ends outside its region");
  const auto key = std::make_pair(place.address.pid, place.address.nonce);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = mapped_.find(key);
  if (found == mapped_.end()) {
    if (mapped_.size() >= kMappings) {
      auto oldest = std::min_element(
          mapped_.begin(), mapped_.end(),
          [](const auto& a, const auto& b) { return a.second.second < b.second.second; });
      mapped_.erase(oldest);
    }
    found = mapped_.emplace(key, std::make_pair(Segment::attach(place.address), 0)).first;
  }
  if (found->second.first.bytes() != place.address.bytes)
    throw Failure("a region of shared memory has changed its size");
  found->second.second = ++uses_;
  return found->second.first.data() + place.offset;
}

}  // namespace lockstep
