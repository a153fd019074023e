#include "layout.h"

#include <algorithm>
#include <cstdlib>

#include "channel.h"
#include "failure.h"

namespace lockstep {

static uint64_t rounded(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A size that tests may shrink, so that small inputs take the long paths.
static uint64_t asked(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  const long long value = std::atoll(text);
  return value > 0 ? rounded(static_cast<uint64_t>(value), kLine) : otherwise;
}

static uint64_t between(uint64_t low, uint64_t value, uint64_t high) {
  return rounded(std::max(low, std::min(value, high)), kLine);
}

Layout Layout::chosen(int ranks) {
  const uint64_t n = static_cast<uint64_t>(ranks);
  Layout layout;
  layout.ranks = static_cast<uint32_t>(ranks);
  // Everything that moves together should stay in the caches: about 6 MiB of
  // stages, whatever the number of ranks.
  layout.slot_bytes = asked("LOCKSTEP_SLOT_BYTES", between(16 << 10, (256 << 10) / n, 64 << 10));
  layout.stage_bytes = asked("LOCKSTEP_STAGE_BYTES", between(64 << 10, (2 << 20) / n, 1 << 20));
  layout.cells = n <= 8 ? 16 : 8;
  layout.cell_bytes = asked("LOCKSTEP_CELL_BYTES", between(256, (64 << 10) / (n * n), 8 << 10));
  layout.lane_bytes = asked("LOCKSTEP_LANE_BYTES", between(4096, (4 << 20) / (n * n), 256 << 10));
  layout.slot_bytes = std::max(layout.slot_bytes, layout.least_slot());
  layout.stage_bytes = std::max(layout.stage_bytes, n * kLine);
  return layout;
}

// The tables of an exchange and a sentence must fit.
uint64_t Layout::least_slot() const {
  return rounded(std::max<uint64_t>(uint64_t{ranks} * 128, 2 * kText), kLine);
}

bool Layout::possible() const {
  if (ranks < 1 || ranks > kMaxRanks || cells < 1 || cells > 1024) return false;
  for (const uint64_t bytes : {slot_bytes, stage_bytes, cell_bytes, lane_bytes})
    if (bytes == 0 || bytes % kLine != 0 || bytes >= (1u << 30)) return false;
  // One line for each rank in a stage.
  return slot_bytes >= least_slot() && stage_bytes >= ranks * kLine;
}

void Layout::write(Header& header) const {
  header.ranks = ranks;
  header.cells = cells;
  header.slot_bytes = slot_bytes;
  header.stage_bytes = stage_bytes;
  header.cell_bytes = cell_bytes;
  header.lane_bytes = lane_bytes;
}

Layout Layout::read(const Header& header, uint64_t bytes) {
  Layout layout;
  layout.ranks = header.ranks;
  layout.cells = header.cells;
  layout.slot_bytes = header.slot_bytes;
  layout.stage_bytes = header.stage_bytes;
  layout.cell_bytes = header.cell_bytes;
  layout.lane_bytes = header.lane_bytes;
  if (!layout.possible() || layout.total() > bytes)
    throw Failure("the sizes in the group's shared memory are impossible");
  return layout;
}

uint64_t Layout::record(int rank) const {
  return rounded(sizeof(Header), 4096) + static_cast<uint64_t>(rank) * sizeof(Record);
}

uint64_t Layout::slot(int rank, int parity) const {
  return record(static_cast<int>(ranks)) + (static_cast<uint64_t>(rank) * 2 + parity) * slot_bytes;
}

uint64_t Layout::stage(int rank, int buffer) const {
  return slot(static_cast<int>(ranks), 0) +
         (static_cast<uint64_t>(rank) * 3 + buffer) * stage_bytes;
}

uint64_t Layout::channel_bytes() const {
  return rounded(sizeof(Channel), kLine) +
         cells * (rounded(sizeof(Cell), kLine) + rounded(cell_bytes, kLine)) +
         2 * rounded(lane_bytes, kLine);
}

uint64_t Layout::channel(int from, int to) const {
  return stage(static_cast<int>(ranks), 0) +
         (static_cast<uint64_t>(from) * ranks + static_cast<uint64_t>(to)) * channel_bytes();
}

uint64_t Layout::total() const { return channel(static_cast<int>(ranks), 0); }

}  // namespace lockstep
