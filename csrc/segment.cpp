#include "segment.h"

#include <fcntl.h>
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

static std::string mebibytes(uint64_t bytes) {
  return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB";
}

// A number of bytes in a file of the kernel, or `otherwise`.
static uint64_t number_in(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : otherwise;  // "max" is no number
}

// Bytes that can still be had: of the machine, and of this process's control groups.
// Asking first matters: a process that takes too much is killed, not told.
static uint64_t available_bytes() {
  uint64_t available = UINT64_MAX;
  std::ifstream machine("/proc/meminfo");
  for (std::string line; std::getline(machine, line);)
    if (line.rfind("MemAvailable:", 0) == 0) available = std::stoull(line.substr(13)) << 10;
  const auto limit = [&](const std::string& folder, const char* most, const char* used) {
    const uint64_t bound = number_in(folder + most, UINT64_MAX);
    const uint64_t taken = number_in(folder + used, 0);
    if (bound != UINT64_MAX) available = std::min(available, bound - std::min(bound, taken));
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" in version 2, "5:memory:/a/b" in version 1; a container sees its own as /.
    const std::string path = line.substr(line.rfind(':') + 1);
    if (line.rfind("0::", 0) == 0)
      limit("/sys/fs/cgroup" + path + "/", "memory.max", "memory.current");
    else if (line.find(":memory:") != std::string::npos)
      limit("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes");
  }
  return available;
}

constexpr uint64_t kWorthAsking = uint64_t{4} << 20;

Segment Segment::create(const std::string& name, uint64_t bytes, uint64_t reserved) {
  Segment segment;
  const uint64_t page = page_bytes();
  bytes = (bytes + page - 1) / page * page;
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd < 0) throw Failure("shared memory could not be created: " + reason());
  segment.address_.fd = fd;
  segment.address_.pid = getpid();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    throw Failure("shared memory of " + mebibytes(bytes) + " could not be created: " + reason());
  fchmod(fd, S_IRUSR | S_IWUSR);
  segment.reserve(0, reserved < page ? page : reserved);
  segment.data_ = map(fd, bytes);
  if (!segment.data_)
    throw Failure("shared memory of " + mebibytes(bytes) + " could not be mapped: " + reason());
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
  } else if (static_cast<uint64_t>(info.st_size) != address.bytes || address.bytes < sizeof(Seal)) {
    wrong = "it is another process's file";
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

void Segment::reserve(uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return;
  if (bytes >= kWorthAsking && bytes > available_bytes())
    throw Failure("there are not " + mebibytes(bytes) + " of memory for shared tensors, only " +
                  mebibytes(available_bytes()));
  int failed;
  do {
    failed = fallocate(address_.fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  if (failed != 0)
    throw Failure("there are not " + mebibytes(bytes) + " of shared memory: " + reason());
}

void Segment::release(uint64_t offset, uint64_t bytes) {
  const uint64_t page = page_bytes();
  const uint64_t from = (offset + page - 1) / page * page;
  const uint64_t to = (offset + bytes) / page * page;
  if (from < to)
    (void)fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(from), static_cast<off_t>(to - from));
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
