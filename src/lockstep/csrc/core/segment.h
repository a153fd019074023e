// A segment of memory that several processes map: a memfd, verified by a nonce.
//
//     creator                                  attacher
//     memfd_create, ftruncate, seal the size   open /proc/PID/fd/FD (same user only)
//     fallocate, map, nonce at offset 0        check the owner and the sealed size
//     publish (pid, fd, bytes, nonce)          map, compare the nonce
//
// Nothing has a name in /dev/shm, so nothing can be left behind there, and the size of
// /dev/shm does not matter. fallocate reserves the pages and the size is sealed, so too
// little memory is an error here and never a SIGBUS later. A matching nonce proves that
// both processes are on one host and in one PID namespace; host names and environment
// variables prove neither inside containers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "available_memory.h"

namespace lockstep {

struct Nonce {
  uint64_t low = 0, high = 0;
  bool operator==(const Nonce& other) const { return low == other.low && high == other.high; }
  bool operator<(const Nonce& other) const {
    return low != other.low ? low < other.low : high < other.high;
  }
};

Nonce random_nonce();

constexpr uint64_t kMaxBytes =
    uint64_t{1} << 62;  // more than any machine has; the sum of two does not overflow

std::string format_mebibytes(uint64_t bytes);  // "3 MiB", rounded up

// What another process needs to attach a segment, like a cudaIpcMemHandle_t.
struct SegmentHandle {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  Nonce nonce;
};

class Segment {
 public:
  Segment() = default;
  // Creates a segment of `bytes`, rounded up to pages, and reserves memory for the first
  // `reserved` bytes. Throws CommError if there is not enough.
  static Segment create(const std::string& name, uint64_t bytes, uint64_t reserved);
  // Maps another process's segment. Throws CommError with the reason; UnopenedError if the segment
  // is no longer there, as after the end of that process.
  static Segment attach(const SegmentHandle& handle);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment();

  char* data() const { return data_; }
  uint64_t bytes() const { return handle_.bytes; }
  const SegmentHandle& handle() const { return handle_; }
  // Reserves memory for [offset, offset + bytes), which must have none yet. Throws
  // CommError if there is not enough, and then reserves nothing. `available` returns the
  // bytes that this process can still get.
  void reserve(
      uint64_t offset, uint64_t bytes,
      const std::function<uint64_t()>& available = [] { return available_memory(); });
  // Returns the memory of the whole pages in [offset, offset + bytes) to the system.
  void release(uint64_t offset, uint64_t bytes);
  // Returns all memory to the system, for every process that maps the segment: the others
  // then see is_released().
  void release_all() { release(0, bytes()); }
  bool is_released() const;
  // Populates the page tables, so that the first touch causes no page fault.
  void prefault(uint64_t offset, uint64_t bytes);
  // Closes the descriptor; the mapping stays. Nobody can attach after this call.
  void close_descriptor();

 private:
  void swap(Segment& other) noexcept;

  char* data_ = nullptr;
  SegmentHandle handle_;
};

// At offset 0 of every segment.
struct SegmentHeader {
  Nonce nonce;
  uint64_t bytes;
  uint32_t version;
  uint32_t magic;
};
constexpr uint32_t kMagic = 0x4c4f434b;  // "LOCK"
constexpr uint32_t kVersion = 4;

}  // namespace lockstep
