// A piece of memory that several processes map: a memfd, proven by a nonce.
//
//     creator                                  attacher
//     memfd_create, ftruncate, fix the size    open /proc/PID/fd/FD     same user only
//     fallocate, map, nonce at offset 0        owner and fixed size checked
//     publish (pid, fd, bytes, nonce)          map, compare the nonce
//
// Nothing has a name in /dev/shm, so nothing is left there and its size does not
// matter. fallocate reserves the pages, and the size is fixed for good: too little
// memory is an error here and never a SIGBUS later. A nonce that fits proves that both
// are on one host in one view of its processes; names and environment variables would
// lie in containers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "headroom.h"

namespace lockstep {

struct Nonce {
  uint64_t low = 0, high = 0;
  bool operator==(const Nonce& other) const { return low == other.low && high == other.high; }
  bool operator<(const Nonce& other) const {
    return low != other.low ? low < other.low : high < other.high;
  }
};

Nonce random_nonce();

constexpr uint64_t kMostBytes = uint64_t{1} << 62;  // no machine has so many; sums of two fit

std::string mebibytes(uint64_t bytes);  // "3 MiB", rounded up

// How another process finds a segment.
struct Address {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  Nonce nonce;
};

class Segment {
 public:
  Segment() = default;
  // Creates `bytes` (rounded up to pages), of which the first `reserved` have memory.
  // Throws Failure where there is not enough.
  static Segment create(const std::string& name, uint64_t bytes, uint64_t reserved);
  // Maps another process's segment. Throws Failure with the reason.
  static Segment attach(const Address& address);

  Segment(Segment&& other) noexcept { swap(other); }
  Segment& operator=(Segment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Segment();

  char* data() const { return data_; }
  uint64_t bytes() const { return address_.bytes; }
  const Address& address() const { return address_; }
  // Gives [offset, offset + bytes) memory, none of which it had; throws Failure, and
  // leaves it without, where there is not enough. `left` says what can still be had.
  void reserve(uint64_t offset, uint64_t bytes,
               const std::function<uint64_t()>& left = [] { return headroom(); });
  // Gives the memory of whole pages in [offset, offset + bytes) back.
  void release(uint64_t offset, uint64_t bytes);
  // Gives all memory back, also for those who have it mapped: they see that it is gone.
  void dissolve() { release(0, bytes()); }
  bool dissolved() const;
  // Fills the page tables, so that the first touch costs no fault.
  void prefault(uint64_t offset, uint64_t bytes);
  // Closes the descriptor; the mapping stays. Nobody can attach after that.
  void seal();

 private:
  void swap(Segment& other) noexcept;

  char* data_ = nullptr;
  Address address_;
};

// The first bytes of every segment.
struct Seal {
  Nonce nonce;
  uint64_t bytes;
  uint32_t version;
  uint32_t magic;
};
constexpr uint32_t kMagic = 0x4c4f434b;  // "LOCK"
constexpr uint32_t kVersion = 2;

}  // namespace lockstep
