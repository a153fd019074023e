#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "failure.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace lockstep {

Nonce random_nonce() {
  Nonce nonce;
  if (getrandom(&nonce, sizeof nonce, 0) != static_cast<ssize_t>(sizeof nonce)) {
    std::random_device device;
    nonce.low = (uint64_t{device()} << 32) | device();
    nonce.high = (uint64_t{device()} << 32) | device();
  }
  return nonce;
}

static std::string reason() { return std::strerror(errno); }

static uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

static char* map(int fd, uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes >> 20) + (bytes % (1 << 20) != 0)) + " MiB";
}

// Several ranks may ask at the same moment and all be told that there is enough. So
// memory is taken piece by piece; unless there is plenty, each rank asks before every
// piece whether all of its rest is there, and something is left over for the pieces that
// others are taking now.
constexpr uint64_t kPiece = uint64_t{4} << 20;
constexpr uint64_t kMargin = uint64_t{32} << 20;
constexpr uint64_t kMostRanks = 64;
constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW;

// Reserves memory of a file; what is wrong, or "".
static std::string allocated(int fd, uint64_t offset, uint64_t bytes) {
  int failed;
  do {
    failed = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  return failed == 0 ? "" : "that may be shared: " + reason();
}

// Whether a file can neither shrink nor grow; false where it is no memfd.
static bool fixed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kFixedSize) == kFixedSize;
}

Segment Segment::create(const std::string& name, uint64_t bytes, uint64_t reserved) {
  if (bytes > kMostBytes) throw Failure("there are not " + mebibytes(bytes) + " of memory");
  Segment segment;
  const uint64_t page = page_bytes();
  bytes = (bytes + page - 1) / page * page;
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw Failure("shared memory could not be created: " + reason());
  segment.address_.fd = fd;
  segment.address_.pid = getpid();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, kFixedSize | F_SEAL_SEAL) != 0)
    throw Failure("shared memory of " + mebibytes(bytes) + " could not be created: " + reason());
  fchmod(fd, S_IRUSR | S_IWUSR);
  segment.reserve(0, reserved < page ? page : reserved);
  segment.data_ = map(fd, bytes);
  if (!segment.data_)
    throw Failure("there are not " + mebibytes(bytes) + " of addresses for shared memory: " +
                  reason());
  segment.address_.bytes = bytes;
  segment.address_.nonce = random_nonce();
  Seal seal{segment.address_.nonce, bytes, kVersion, kMagic};
  std::memcpy(segment.data_, &seal, sizeof seal);
  return segment;
}

Segment Segment::attach(const Address& address) {
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0)
    throw Failure("shared memory of process " + std::to_string(address.pid) +
                  " could not be opened: " + reason());
  struct stat info{};
  std::string wrong;
  if (fstat(fd, &info) != 0) {
    wrong = reason();
  } else if (info.st_uid != geteuid()) {
    wrong = "it belongs to another user";
  } else if (static_cast<uint64_t>(info.st_size) != address.bytes ||
             address.bytes < sizeof(Seal) || !fixed(fd)) {
    // Whatever else the number names by now, or a file that could shrink below us.
    wrong = "it is another file of that process";
  }
  Segment segment;
  if (wrong.empty()) {
    segment.data_ = map(fd, address.bytes);
    if (!segment.data_) wrong = reason();
  }
  close(fd);
  if (wrong.empty()) {
    segment.address_ = address;
    segment.address_.fd = -1;  // the descriptor is the creator's
    Seal seal;
    std::memcpy(&seal, segment.data_, sizeof seal);
    if (!(seal.nonce == address.nonce) || seal.magic != kMagic || seal.bytes != address.bytes)
      wrong = "the proof does not fit";
    else if (seal.version != kVersion)
      wrong = "it was made by another version of lockstep";
  }
  if (!wrong.empty())
    throw Failure("shared memory of process " + std::to_string(address.pid) +
                  " could not be attached: " + wrong);
  return segment;
}

Segment::~Segment() {
  if (data_) munmap(data_, address_.bytes);
  seal();
}

void Segment::swap(Segment& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(address_, other.address_);
}

void Segment::reserve(uint64_t offset, uint64_t bytes, const std::function<uint64_t()>& left) {
  bool plenty = false;  // for all ranks that a host can have
  for (uint64_t done = 0; done < bytes; done += std::min(kPiece, bytes - done)) {
    std::string wrong;
    if (!plenty) {
      const uint64_t all = left(), can = all - std::min(all, kMargin);
      plenty = (bytes - done) <= can / kMostRanks;
      if (bytes - done > can) wrong = "for shared tensors, only " + mebibytes(done + can);
    }
    if (wrong.empty()) wrong = allocated(address_.fd, offset + done, std::min(kPiece, bytes - done));
    if (wrong.empty()) continue;
    release(offset, done);
    throw Failure("there are not " + mebibytes(bytes) + " of memory " + wrong);
  }
}

void Segment::release(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t from = (offset + page - 1) / page * page;
  const uint64_t to = (offset + bytes) / page * page;
  if (from < to)
    (void)fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(from), static_cast<off_t>(to - from));
}

bool Segment::dissolved() const {
  return __atomic_load_n(&reinterpret_cast<const Seal*>(data_)->magic, __ATOMIC_ACQUIRE) != kMagic;
}

void Segment::prefault(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t from = offset / page * page;
  const uint64_t to = offset + bytes;
  if (madvise(data_ + from, to - from, MADV_POPULATE_WRITE) == 0) return;
  // An older kernel: touch every page, without changing it.
  for (uint64_t at = from; at < to; at += page)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data_ + at), 0, __ATOMIC_RELAXED);
}

void Segment::seal() {
  if (address_.fd >= 0) close(address_.fd);
  address_.fd = -1;
}

}  // namespace lockstep
