#include "heap.h"

#include <pthread.h>

#include <algorithm>

#include "failure.h"

namespace lockstep {

constexpr uint64_t kRegion = uint64_t{64} << 20;
constexpr uint64_t kFirst = 4096;              // the seal has the first page
constexpr uint64_t kStep = uint64_t{1} << 20;  // memory is asked for in such steps
constexpr uint64_t kShare = 16;                // one such part of what is left may be idle

// ---- the heap of a process ----

// Never destroyed: tensors may outlive everything else.
static std::atomic<Heap*> of_this_process{nullptr};

// A forked child's regions would be its parent's: it starts anew. Without a lock, which
// a thread that the child does not have might hold.
[[maybe_unused]] static const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { of_this_process.store(nullptr); });

Heap& Heap::here() {
  Heap* heap = of_this_process.load(std::memory_order_acquire);
  if (heap) return *heap;
  auto fresh = std::make_unique<Heap>();
  if (of_this_process.compare_exchange_strong(heap, fresh.get())) return *fresh.release();
  return *heap;
}

Heap::Heap(std::function<uint64_t()> left) : left_(std::move(left)), keeps_(kRegion) {}

// ---- taking ----

void* Heap::allocate(uint64_t bytes) {
  if (bytes > kMostBytes) throw Failure("there are not " + mebibytes(bytes) + " of memory");
  bytes = std::max<uint64_t>((bytes + kLine - 1) / kLine * kLine, kLine);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto attempt = [&] {
    void* data = reuse(bytes);
    return data ? data : extend(bytes);
  };
  try {
    return attempt();
  } catch (const Failure&) {
    if (!trim(0)) throw;
  }
  return attempt();
}

// A region that was made for one large tensor serves another of about its size, and no
// small ones, which would keep it from doing so.
bool Heap::Region::serves(uint64_t bytes) const {
  return segment.bytes() <= kRegion || bytes >= segment.bytes() / 4 * 3;
}

Heap::Spans::iterator Heap::Region::hole_for(uint64_t bytes) {
  auto best = holes.end();
  for (auto hole = holes.begin(); hole != holes.end(); ++hole)
    if (hole->second >= bytes && (best == holes.end() || hole->second < best->second)) best = hole;
  return best;
}

void* Heap::reuse(uint64_t bytes) {
  Region* smallest = nullptr;
  Spans::iterator chosen;
  for (auto& [start, region] : regions_) {
    if (!region->serves(bytes)) continue;
    if (smallest && region->segment.bytes() >= smallest->segment.bytes()) continue;
    const auto hole = region->hole_for(bytes);
    if (hole == region->holes.end()) continue;
    smallest = region.get();
    chosen = hole;
  }
  return smallest ? take(*smallest, chosen, bytes) : nullptr;
}

void* Heap::extend(uint64_t bytes) {
  auto region = std::make_unique<Region>();
  const uint64_t size = std::max(kRegion, bytes + kFirst);
  region->segment = Segment::create("lockstep-heap", size, kFirst);
  region->warm = kFirst;
  const auto all = region->holes.emplace(kFirst, region->segment.bytes() - kFirst).first;
  void* data = take(*region, all, bytes);
  const char* start = region->segment.data();
  const char* end = start + region->segment.bytes();
  if (!low_.load() || start < low_.load()) low_ = start;
  if (end > high_.load()) high_ = end;
  regions_.emplace(start, std::move(region));
  return data;
}

void* Heap::take(Region& region, Spans::iterator hole, uint64_t bytes) {
  const auto [offset, room] = *hole;
  if (const uint64_t end = offset + bytes; end > region.warm) {
    const uint64_t warm =
        std::min((end + kStep - 1) / kStep * kStep, region.segment.bytes());
    region.segment.reserve(region.warm, warm - region.warm, left_);
    region.segment.prefault(region.warm, warm - region.warm);
    region.warm = warm;
  }
  region.holes.erase(hole);
  if (room > bytes) region.holes[offset + bytes] = room - bytes;
  region.blocks[offset] = bytes;
  used_ += bytes;
  return region.segment.data() + offset;
}

// ---- giving back ----

void Heap::free(void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  Region* region = region_of(data);
  if (!region) return;
  const uint64_t offset = static_cast<uint64_t>(static_cast<char*>(data) - region->segment.data());
  const auto block = region->blocks.find(offset);
  if (block == region->blocks.end()) return;
  const uint64_t bytes = block->second;
  used_ -= bytes;
  region->blocks.erase(block);
  region->add_hole(offset, bytes);
  if (region->blocks.empty()) rest(*region);
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

void Heap::rest(Region& region) {
  region.idle_since = ++idlings_;
  if (idle_bytes() <= keeps_) return;
  keeps_ = std::max(kRegion, left_() / kShare);
  trim(keeps_);
}

// Gives back what has been idle longest until at most `most` bytes are; whether any was.
bool Heap::trim(uint64_t most) {
  bool any = false;
  for (; idle_bytes() > most; any = true) {
    auto oldest = regions_.end();
    for (auto entry = regions_.begin(); entry != regions_.end(); ++entry)
      if (entry->second->blocks.empty() &&
          (oldest == regions_.end() || entry->second->idle_since < oldest->second->idle_since))
        oldest = entry;
    oldest->second->segment.dissolve();
    regions_.erase(oldest);
  }
  return any;
}

uint64_t Heap::idle_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [start, region] : regions_)
    if (region->blocks.empty()) bytes += region->warm - kFirst;
  return bytes;
}

// ---- asking ----

uint64_t Heap::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

uint64_t Heap::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes();
}

Heap::Region* Heap::region_of(const void* data) {
  const char* address = static_cast<const char*>(data);
  auto entry = regions_.upper_bound(address);
  if (entry == regions_.begin()) return nullptr;
  --entry;
  Region& region = *entry->second;
  return address < entry->first + region.segment.bytes() ? &region : nullptr;
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

}  // namespace lockstep
