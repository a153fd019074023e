#include "heap.h"

#include <pthread.h>

#include <algorithm>

#include "errors.h"

namespace lockstep {

constexpr uint64_t kRegionBytes = uint64_t{64} << 20;
constexpr uint64_t kHeaderBytes = 4096;              // the segment's header has the first page
constexpr uint64_t kCommitStep = uint64_t{1} << 20;  // granularity of reserving memory
constexpr uint64_t kIdleFraction = 16;               // 1/16 of the available memory may be idle

// ---- the heap of a process ----

// Never destroyed: tensors may outlive everything else.
static std::atomic<Heap*> process_heap{nullptr};

// A forked child starts with a heap of its own: the regions are its parent's. There is no
// lock here, because a thread that the child does not have might hold it.
[[maybe_unused]] static const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { process_heap.store(nullptr); });

Heap& Heap::instance() {
  Heap* heap = process_heap.load(std::memory_order_acquire);
  if (heap) return *heap;
  auto fresh = std::make_unique<Heap>();
  if (process_heap.compare_exchange_strong(heap, fresh.get())) return *fresh.release();
  return *heap;
}

Heap::Heap(std::function<uint64_t()> available)
    : available_(std::move(available)), idle_limit_(kRegionBytes) {}

// ---- allocating ----

void* Heap::allocate(uint64_t bytes) {
  if (bytes > kMaxBytes)
    throw CommError("cannot reserve " + format_mebibytes(bytes) +
                    " of shared memory: no machine has this much");
  bytes = std::max<uint64_t>((bytes + kCacheLine - 1) / kCacheLine * kCacheLine, kCacheLine);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto attempt = [&] {
    void* data = reuse(bytes);
    return data ? data : add_region(bytes);
  };
  try {
    return attempt();
  } catch (const CommError&) {
    if (!trim(0)) throw;
  }
  return attempt();
}

// A region that was created for one large tensor is reused for one of about that size,
// not for small ones, which would prevent that.
bool Heap::Region::is_suitable(uint64_t bytes) const {
  return segment.bytes() <= kRegionBytes || bytes >= segment.bytes() / 4 * 3;
}

Heap::Spans::iterator Heap::Region::find_hole(uint64_t bytes) {
  auto best = holes.end();
  for (auto hole = holes.begin(); hole != holes.end(); ++hole)
    if (hole->second >= bytes && (best == holes.end() || hole->second < best->second)) best = hole;
  return best;
}

void* Heap::reuse(uint64_t bytes) {
  Region* smallest = nullptr;
  Spans::iterator chosen;
  for (auto& [start, region] : regions_) {
    if (!region->is_suitable(bytes)) continue;
    if (smallest && region->segment.bytes() >= smallest->segment.bytes()) continue;
    const auto hole = region->find_hole(bytes);
    if (hole == region->holes.end()) continue;
    smallest = region.get();
    chosen = hole;
  }
  return smallest ? claim(*smallest, chosen, bytes) : nullptr;
}

void* Heap::add_region(uint64_t bytes) {
  auto region = std::make_unique<Region>();
  const uint64_t size = std::max(kRegionBytes, bytes + kHeaderBytes);
  region->segment = Segment::create("lockstep-heap", size, kHeaderBytes);
  region->committed = kHeaderBytes;
  const auto all =
      region->holes.emplace(kHeaderBytes, region->segment.bytes() - kHeaderBytes).first;
  void* data = claim(*region, all, bytes);
  const char* start = region->segment.data();
  const char* end = start + region->segment.bytes();
  if (!lowest_.load() || start < lowest_.load()) lowest_ = start;
  if (end > highest_.load()) highest_ = end;
  regions_.emplace(start, std::move(region));
  return data;
}

void* Heap::claim(Region& region, Spans::iterator hole, uint64_t bytes) {
  const auto [offset, room] = *hole;
  if (const uint64_t end = offset + bytes; end > region.committed) {
    const uint64_t committed =
        std::min((end + kCommitStep - 1) / kCommitStep * kCommitStep, region.segment.bytes());
    region.segment.reserve(region.committed, committed - region.committed, available_);
    region.segment.prefault(region.committed, committed - region.committed);
    region.committed = committed;
  }
  region.holes.erase(hole);
  if (room > bytes) region.holes[offset + bytes] = room - bytes;
  region.blocks[offset] = bytes;
  used_ += bytes;
  return region.segment.data() + offset;
}

// ---- freeing ----

void Heap::free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Region* region = find_region(data);
  if (!region) return;
  const uint64_t offset = static_cast<uint64_t>(static_cast<char*>(data) - region->segment.data());
  const auto block = region->blocks.find(offset);
  if (block == region->blocks.end()) return;
  const uint64_t bytes = block->second;
  used_ -= bytes;
  region->blocks.erase(block);
  region->add_hole(offset, bytes);
  if (region->blocks.empty()) mark_idle(*region);
}

void Heap::Region::add_hole(uint64_t offset, uint64_t bytes) {
  auto after = holes.lower_bound(offset);
  if (after != holes.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = holes.erase(after);
  }
  if (after != holes.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  holes.emplace_hint(after, offset, bytes);
}

void Heap::mark_idle(Region& region) {
  region.idle_since = ++idle_events_;
  if (count_idle_bytes() <= idle_limit_) return;
  idle_limit_ = std::max(kRegionBytes, available_() / kIdleFraction);
  trim(idle_limit_);
}

// Releases idle regions, longest idle first, until at most `limit` bytes are idle. Returns
// whether any was released.
bool Heap::trim(uint64_t limit) {
  bool any = false;
  for (; count_idle_bytes() > limit; any = true) {
    auto oldest = regions_.end();
    for (auto entry = regions_.begin(); entry != regions_.end(); ++entry)
      if (entry->second->blocks.empty() &&
          (oldest == regions_.end() || entry->second->idle_since < oldest->second->idle_since))
        oldest = entry;
    oldest->second->segment.release_all();
    regions_.erase(oldest);
  }
  return any;
}

uint64_t Heap::count_idle_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [start, region] : regions_)
    if (region->blocks.empty()) bytes += region->committed - kHeaderBytes;
  return bytes;
}

// ---- querying ----

uint64_t Heap::used_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

uint64_t Heap::idle_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_idle_bytes();
}

Heap::Region* Heap::find_region(const void* data) {
  const char* address = static_cast<const char*>(data);
  auto entry = regions_.upper_bound(address);
  if (entry == regions_.begin()) return nullptr;
  --entry;
  Region& region = *entry->second;
  return address < entry->first + region.segment.bytes() ? &region : nullptr;
}

BufferHandle Heap::find(const void* data, uint64_t bytes) {
  const char* address = static_cast<const char*>(data);
  if (address < lowest_.load(std::memory_order_relaxed) ||
      address >= highest_.load(std::memory_order_relaxed))
    return {};
  std::lock_guard<std::mutex> lock(mutex_);
  Region* region = find_region(data);
  if (!region) return {};
  const uint64_t offset = static_cast<uint64_t>(address - region->segment.data());
  auto block = region->blocks.upper_bound(offset);
  if (block == region->blocks.begin()) return {};
  --block;
  if (offset + bytes > block->first + block->second) return {};
  return {region->segment.handle(), offset};
}

}  // namespace lockstep
