#include "layout.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "channel.h"
#include "errors.h"

namespace lockstep {

static uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Returns a size, or what tests set instead so that small inputs take the long paths.
static uint64_t size_from_env(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  if (!text || !*text) return fallback;
  const long long value = std::strtoll(text, nullptr, 10);
  return value > 0 ? round_up(static_cast<uint64_t>(value), kCacheLine) : fallback;
}

static uint64_t clamp_to_lines(uint64_t low, uint64_t value, uint64_t high) {
  return round_up(std::max(low, std::min(value, high)), kCacheLine);
}

// From the kernel: sysconf of glibc 2.36 says 320 MiB for a cache of 32 MiB on AMD.
static uint64_t read_cache_bytes() {
  for (const char* level : {"3", "2"}) {
    std::ifstream file(std::string("/sys/devices/system/cpu/cpu0/cache/index") + level + "/size");
    uint64_t size = 0;
    char unit = 0;
    if (file >> size >> unit && size > 0) return unit == 'K' ? size << 10 : size << 20;
  }
  return uint64_t{32} << 20;  // unknown
}

uint64_t last_level_cache_bytes() {
  static const uint64_t bytes = read_cache_bytes();
  return size_from_env("LOCKSTEP_CACHE_BYTES", bytes);
}

Layout Layout::choose(int ranks) {
  const uint64_t n = static_cast<uint64_t>(ranks);
  Layout layout;
  layout.ranks = static_cast<uint32_t>(ranks);
  // The data in flight should stay in the caches: at most 6 MiB of staging buffers in all,
  // for any number of ranks.
  layout.slot_bytes =
      size_from_env("LOCKSTEP_SLOT_BYTES", clamp_to_lines(16 << 10, (256 << 10) / n, 64 << 10));
  layout.staging_bytes =
      size_from_env("LOCKSTEP_STAGING_BYTES", clamp_to_lines(64 << 10, (2 << 20) / n, 512 << 10));
  layout.cells = n <= 8 ? 16 : 8;
  layout.cell_bytes =
      size_from_env("LOCKSTEP_CELL_BYTES", clamp_to_lines(256, (64 << 10) / (n * n), 8 << 10));
  layout.bounce_bytes =
      size_from_env("LOCKSTEP_BOUNCE_BYTES", clamp_to_lines(4096, (4 << 20) / (n * n), 256 << 10));
  layout.slot_bytes = std::max(layout.slot_bytes, layout.min_slot_bytes());
  layout.staging_bytes = std::max(layout.staging_bytes, n * kCacheLine);
  return layout;
}

// The tables of an exchange and an error message must fit.
uint64_t Layout::min_slot_bytes() const {
  return round_up(std::max<uint64_t>(uint64_t{ranks} * 128, 2 * kTextBytes), kCacheLine);
}

bool Layout::is_valid() const {
  if (ranks < 1 || ranks > kMaxRanks || cells < 1 || cells > 1024) return false;
  for (const uint64_t bytes : {slot_bytes, staging_bytes, cell_bytes, bounce_bytes})
    if (bytes == 0 || bytes % kCacheLine != 0 || bytes >= (1u << 30)) return false;
  // A staging buffer has one cache line per rank.
  return slot_bytes >= min_slot_bytes() && staging_bytes >= ranks * kCacheLine;
}

void Layout::write(GroupHeader& header) const {
  header.ranks = ranks;
  header.cells = cells;
  header.slot_bytes = slot_bytes;
  header.staging_bytes = staging_bytes;
  header.cell_bytes = cell_bytes;
  header.bounce_bytes = bounce_bytes;
}

Layout Layout::read(const GroupHeader& header, uint64_t bytes) {
  Layout layout;
  layout.ranks = header.ranks;
  layout.cells = header.cells;
  layout.slot_bytes = header.slot_bytes;
  layout.staging_bytes = header.staging_bytes;
  layout.cell_bytes = header.cell_bytes;
  layout.bounce_bytes = header.bounce_bytes;
  if (!layout.is_valid() || layout.total() > bytes)
    throw CommError("the sizes in the group's shared memory are invalid");
  return layout;
}

uint64_t Layout::rank_state(int rank) const {
  return round_up(sizeof(GroupHeader), 4096) + static_cast<uint64_t>(rank) * sizeof(RankState);
}

uint64_t Layout::slot(int rank, int parity) const {
  return rank_state(static_cast<int>(ranks)) +
         (static_cast<uint64_t>(rank) * 2 + parity) * slot_bytes;
}

uint64_t Layout::staging_buffer(int rank, int buffer) const {
  return slot(static_cast<int>(ranks), 0) +
         (static_cast<uint64_t>(rank) * 3 + buffer) * staging_bytes;
}

uint64_t Layout::channel_bytes() const {
  return round_up(sizeof(Channel), kCacheLine) +
         cells * (round_up(sizeof(Cell), kCacheLine) + round_up(cell_bytes, kCacheLine)) +
         2 * round_up(bounce_bytes, kCacheLine);
}

uint64_t Layout::channel(int from, int to) const {
  return staging_buffer(static_cast<int>(ranks), 0) +
         (static_cast<uint64_t>(from) * ranks + static_cast<uint64_t>(to)) * channel_bytes();
}

uint64_t Layout::total() const { return channel(static_cast<int>(ranks), 0); }

}  // namespace lockstep
