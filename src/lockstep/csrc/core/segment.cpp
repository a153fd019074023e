#include "segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>

#include "errors.h"

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

static std::string last_error() { return std::strerror(errno); }

static uint64_t page_bytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

static char* map_file(int fd, uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

std::string format_mebibytes(uint64_t bytes) {
  return std::to_string((bytes >> 20) + (bytes % (1 << 20) != 0)) + " MiB";
}

// Several ranks may query the available memory at the same moment, and each may find
// enough for itself alone. So memory is reserved in pieces. Unless memory is plentiful, a
// rank checks before every piece that all of its remaining bytes are available, minus a
// margin for the pieces that others are reserving at the same time.
constexpr uint64_t kReservePiece = uint64_t{4} << 20;
constexpr uint64_t kReserveMargin = uint64_t{32} << 20;
constexpr uint64_t kMaxHostRanks = 64;
constexpr int kFixedSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Reserves memory of a file. Returns what went wrong, or "". The limit of the size of files
// (ulimit -f) applies to a memfd: EFBIG.
static std::string allocate(int fd, uint64_t offset, uint64_t bytes) {
  int failed;
  do {
    failed = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  return failed == 0 ? "" : last_error();
}

// Whether a file can neither shrink nor grow; false if it is not a memfd.
static bool has_fixed_size(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kFixedSizeSeals) == kFixedSizeSeals;
}

Segment Segment::create(const std::string& name, uint64_t bytes, uint64_t reserved) {
  if (bytes > kMaxBytes)
    throw CommError("cannot reserve " + format_mebibytes(bytes) +
                    " of shared memory: no machine has this much");
  Segment segment;
  const uint64_t page = page_bytes();
  bytes = (bytes + page - 1) / page * page;
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw CommError("cannot create shared memory: " + last_error());
  segment.handle_.fd = fd;
  segment.handle_.pid = getpid();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, kFixedSizeSeals | F_SEAL_SEAL) != 0)
    throw CommError("cannot create " + format_mebibytes(bytes) +
                    " of shared memory: " + last_error());
  fchmod(fd, S_IRUSR | S_IWUSR);
  segment.reserve(0, reserved < page ? page : reserved);
  segment.data_ = map_file(fd, bytes);
  if (!segment.data_)
    throw CommError("cannot map " + format_mebibytes(bytes) + " of shared memory: " + last_error());
  segment.handle_.bytes = bytes;
  segment.handle_.nonce = random_nonce();
  SegmentHeader header{segment.handle_.nonce, bytes, kVersion, kMagic};
  std::memcpy(segment.data_, &header, sizeof header);
  return segment;
}

// Whether a process has ended, or is a zombie.
static bool has_ended(int pid) {
  if (kill(pid, 0) != 0) return errno == ESRCH;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  const size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return false;
  const char state = text[name_end + 2];
  return state == 'Z' || state == 'X';
}

// `reason` is the error of the system. A zombie has no descriptors, and denies access to them.
[[noreturn]] static void throw_unopened(int pid, int reason) {
  const std::string text =
      "cannot open shared memory of process " + std::to_string(pid) + ": " + std::strerror(reason);
  if (reason == ENOENT || reason == ESRCH || has_ended(pid)) throw UnopenedError(text);
  throw CommError(text);  // such as too many open files
}

Segment Segment::attach(const SegmentHandle& handle) {
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw_unopened(handle.pid, errno);
  struct stat info{};
  std::string error;
  bool is_gone = false;
  if (fstat(fd, &info) != 0) {
    error = last_error();
  } else if (info.st_uid != geteuid()) {
    error = "it belongs to another user";
    is_gone = true;
  } else if (static_cast<uint64_t>(info.st_size) != handle.bytes ||
             handle.bytes < sizeof(SegmentHeader) || !has_fixed_size(fd)) {
    // The descriptor number may name another file by now, or one that could shrink.
    error = "it is another file of that process";
    is_gone = true;
  }
  Segment segment;
  if (error.empty()) {
    segment.data_ = map_file(fd, handle.bytes);
    if (!segment.data_) error = last_error();
  }
  close(fd);
  if (error.empty()) {
    segment.handle_ = handle;
    segment.handle_.fd = -1;  // the descriptor is the creator's
    SegmentHeader header;
    std::memcpy(&header, segment.data_, sizeof header);
    is_gone =
        !(header.nonce == handle.nonce) || header.magic != kMagic || header.bytes != handle.bytes;
    if (is_gone)
      error = "the nonce does not match";
    else if (header.version != kVersion)
      error = "it was created by another version of lockstep";
  }
  if (error.empty()) return segment;
  error = "cannot attach shared memory of process " + std::to_string(handle.pid) + ": " + error;
  if (is_gone) throw UnopenedError(error);  // the process that had this number has ended
  throw CommError(error);
}

Segment::~Segment() {
  if (data_) munmap(data_, handle_.bytes);
  close_descriptor();
}

void Segment::swap(Segment& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(handle_, other.handle_);
}

void Segment::reserve(uint64_t offset, uint64_t bytes, const std::function<uint64_t()>& available) {
  bool plenty = false;  // enough for as many ranks as a host can have
  for (uint64_t done = 0; done < bytes; done += std::min(kReservePiece, bytes - done)) {
    std::string error;
    if (!plenty) {
      const uint64_t all = available(), usable = all - std::min(all, kReserveMargin);
      plenty = (bytes - done) <= usable / kMaxHostRanks;
      if (bytes - done > usable)
        error = "only " + format_mebibytes(done + usable) + " are available";
    }
    if (error.empty())
      error = allocate(handle_.fd, offset + done, std::min(kReservePiece, bytes - done));
    if (error.empty()) continue;
    release(offset, done);
    throw CommError("cannot reserve " + format_mebibytes(bytes) + " of shared memory: " + error);
  }
}

void Segment::release(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t from = (offset + page - 1) / page * page;
  const uint64_t to = (offset + bytes) / page * page;
  if (from < to)
    (void)fallocate(handle_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(from), static_cast<off_t>(to - from));
}

bool Segment::is_released() const {
  const auto* header = reinterpret_cast<const SegmentHeader*>(data_);
  return __atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) != kMagic;
}

void Segment::prefault(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t from = offset / page * page;
  const uint64_t to = offset + bytes;
  if (madvise(data_ + from, to - from, MADV_POPULATE_WRITE) == 0) return;
  // On older kernels, touch every page without changing it.
  for (uint64_t at = from; at < to; at += page)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(data_ + at), 0, __ATOMIC_RELAXED);
}

void Segment::close_descriptor() {
  if (handle_.fd >= 0) close(handle_.fd);
  handle_.fd = -1;
}

}  // namespace lockstep
