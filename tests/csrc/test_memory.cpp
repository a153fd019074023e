// Memory: segments and the processes that may attach them, the heap, peer mappings.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "check.h"
#include "errors.h"
#include "heap.h"
#include "layout.h"
#include "peer_mappings.h"
#include "ranks.h"

using namespace lockstep;

namespace {

// Measures the memory of a segment of this process, even after the segment is destroyed.
class Witness {
 public:
  explicit Witness(const SegmentHandle& handle)
      : fd_(open(("/proc/self/fd/" + std::to_string(handle.fd)).c_str(), O_RDWR | O_CLOEXEC)) {
    CHECK(fd_ >= 0);
  }
  ~Witness() { close(fd_); }
  uint64_t bytes() const {
    struct stat info{};
    CHECK(fstat(fd_, &info) == 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  }

 private:
  int fd_;
};

const std::atomic<uint32_t> kNotAborted{0};

BufferHandle handle_of(Heap& heap, void* data) { return heap.find(data, 1); }

}  // namespace

// ---- segments ----

TEST(an_attached_segment_is_verified) {
  auto group = Group::create(2, {});
  SegmentHandle handle = group->segment()->handle();
  handle.nonce.low ^= 1;
  CHECK(contains(error_of([&] { Group::attach(1, 2, handle, {}); }), "nonce does not match"));
  handle = group->segment()->handle();
  handle.bytes += 4096;
  CHECK(contains(error_of([&] { Group::attach(1, 2, handle, {}); }), "another file"));
  handle.fd = 100000;
  CHECK(contains(error_of([&] { Group::attach(1, 2, handle, {}); }), "cannot open shared memory"));
}

TEST(memory_of_a_process_that_has_ended_is_the_loss_of_its_rank) {
  if (!kMayFork) return;
  BufferHandle buffer;
  buffer.segment = handle_of_dead_process();
  auto group = Group::create(2, {});
  auto other = Group::attach(1, 2, group->segment(), {});
  CollectiveCall call(*group, barrier_info(), kTestTimeout, false);
  bool is_lost = false;
  try {
    call.map(1, buffer, 64);
  } catch (const CommError& error) {
    is_lost = error.failure.loss == Loss::unopened && error.failure.rank == 1;
    CHECK(contains(error.what(), "rank 0: barrier #1 on group default failed: rank 1 is gone: "));
  }
  CHECK(is_lost);
  CHECK(other->failure().loss == Loss::unopened && other->failure().rank == 1);
}

TEST(a_zombie_is_a_lost_rank_and_too_many_open_files_are_not) {
  if (!kMayFork) return;
  const Segment mine = Segment::create("test", 4096, 4096);
  SegmentHandle handle = mine.handle();
  handle.pid = fork();
  if (handle.pid == 0) _exit(0);
  siginfo_t ended;
  CHECK(waitid(P_PID, static_cast<id_t>(handle.pid), &ended, WEXITED | WNOWAIT) == 0);
  const auto is_lost = [](const SegmentHandle& handle) {
    try {
      Segment::attach(handle);
    } catch (const UnopenedError&) {
      return true;
    } catch (const CommError&) {
    }
    return false;
  };
  CHECK(is_lost(handle));
  CHECK(waitpid(handle.pid, nullptr, 0) == handle.pid);
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none{0, limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK(!is_lost(mine.handle()));
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

TEST(a_file_that_could_shrink_is_not_attached) {
  Segment real = Segment::create("test", 4096, 4096);
  CHECK(ftruncate(real.handle().fd, 0) != 0);
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(write(fd, real.data(), 4096) == 4096);
  SegmentHandle handle = real.handle();
  handle.fd = fd;
  CHECK(contains(error_of([&] { Segment::attach(handle); }), "another file"));
  close(fd);
}

TEST(segments_of_another_user_are_not_attached) {
  if (!kMayFork) return;
  if (geteuid() != 0) {
    std::printf("  not root: can't become another user to try\n");
    return;
  }
  const Segment mine = Segment::create("test", 4096, 4096);
  int to_child[2], to_parent[2];
  CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    constexpr uid_t kNobody = 65534;
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(2);
    const std::string error = error_of([&] { Segment::attach(mine.handle()); });
    const Segment other = Segment::create("test", 4096, 4096);
    const SegmentHandle handle = other.handle();
    char go;
    if (write(to_parent[1], &handle, sizeof handle) != sizeof handle) _exit(3);
    if (read(to_child[0], &go, 1) != 1) _exit(4);
    _exit(contains(error, "cannot open shared memory") ? 0 : 5);
  }
  SegmentHandle handle;
  CHECK(read(to_parent[0], &handle, sizeof handle) == sizeof handle);
  CHECK(contains(error_of([&] { Segment::attach(handle); }), "another user"));
  CHECK(write(to_child[1], "x", 1) == 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(fd);
}

TEST(too_little_memory_is_an_error_not_a_signal) {
  // No machine has 4 EiB.
  for (const uint64_t bytes : {uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - 63}) {
    const std::string error = format_mebibytes(bytes) + " of shared memory: ";
    CHECK(contains(error_of([&] { Segment::create("test", bytes, 4096); }), error));
    CHECK(contains(error_of([&] { Segment::create("test", bytes, bytes); }), error));
    CHECK(contains(error_of([&] { Heap().allocate(bytes); }), "cannot reserve"));
  }
}

TEST(a_reservation_that_runs_out_of_memory_is_released) {
  Segment segment = Segment::create("test", 64 * kMiB, 4096);
  const Witness witness(segment.handle());
  const uint64_t before = witness.bytes();
  uint64_t most = 0;
  // Another rank reserves as much at the same time.
  uint64_t left = 90 * kMiB;
  const auto asked = [&] {
    most = std::max(most, witness.bytes());
    return left -= 8 * kMiB;
  };
  CHECK(contains(error_of([&] { segment.reserve(4096, 32 * kMiB, asked); }),
                 "cannot reserve 32 MiB of shared memory: only "));
  CHECK(most > before + 4 * kMiB);
  CHECK(witness.bytes() == before);
}

// ---- layouts ----

TEST(invalid_sizes_are_refused) {
  auto group = Group::create(2, {});
  GroupHeader& header = group->header();
  const Layout good = group->layout();
  const auto refused = [&](uint64_t& size, uint64_t value) {
    const uint64_t before = size;
    size = value;
    CHECK(contains(error_of([&] { Group::attach(1, 2, group->segment(), {}); }), "are invalid"));
    size = before;
  };
  for (uint64_t* size :
       {&header.slot_bytes, &header.staging_bytes, &header.cell_bytes, &header.bounce_bytes})
    for (const uint64_t value :
         {uint64_t{0}, uint64_t{8}, *size + 8, uint64_t{1} << 29, UINT64_MAX})
      refused(*size, value);
  refused(header.slot_bytes, 64);
  refused(header.staging_bytes, 64);
  CHECK(Layout::read(header, good.total()).total() == good.total());
}

TEST(a_group_of_any_size_needs_less_than_64_mebibytes) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    const Layout layout = Layout::choose(ranks);
    GroupHeader header;
    layout.write(header);
    CHECK(Layout::read(header, layout.total()).total() == layout.total());
    CHECK(layout.total() < 64 * kMiB);
  }
}

// ---- the heap ----

TEST(freed_blocks_are_merged_and_reused) {
  Heap& heap = Heap::instance();
  const uint64_t before = heap.used_bytes();
  char* a = static_cast<char*>(heap.allocate(1000));
  char* b = static_cast<char*>(heap.allocate(1000));
  CHECK(heap.find(a + 10, 100).is_shared());
  CHECK(!heap.find(a + 1000, 2000).is_shared());
  CHECK(!heap.find(&before, 8).is_shared());
  heap.free(a);
  heap.free(b);
  char* c = static_cast<char*>(heap.allocate(2000));
  CHECK(c == a);
  heap.free(c);
  CHECK(heap.used_bytes() == before);
}

TEST(a_large_tensor_reuses_the_memory_of_the_last_one) {
  Heap heap([] { return kMiB * 16 * 200; });
  char* first = static_cast<char*>(heap.allocate(66 * kMiB));
  heap.free(first);
  CHECK(heap.idle_bytes() >= 66 * kMiB);
  char* small = static_cast<char*>(heap.allocate(kMiB));
  CHECK(!(small >= first && small < first + 66 * kMiB));
  char* second = static_cast<char*>(heap.allocate(65 * kMiB));
  CHECK(second == first);
  CHECK(heap.used_bytes() == 66 * kMiB);
  heap.free(second);
  heap.free(small);
}

TEST(memory_of_large_tensors_returns_to_the_system) {
  Heap heap([] { return 1024 * kMiB; });  // a sixteenth of it is one region
  PeerMappings peer_mappings(kNotAborted);
  void* kept = heap.allocate(kMiB);
  const Witness small(handle_of(heap, kept).segment);
  peer_mappings.map(handle_of(heap, kept), kMiB);
  for (int again = 0; again < 3; ++again) {
    void* data = heap.allocate(65 * kMiB);
    const BufferHandle buffer = handle_of(heap, data);
    const Witness witness(buffer.segment);
    // The peer maps the same memory, and touches it.
    char* there = peer_mappings.map(buffer, 65 * kMiB);
    std::memset(data, 1 + again, 4096);
    CHECK(there[0] == 1 + again);
    CHECK(witness.bytes() >= 65 * kMiB);
    heap.free(data);
    CHECK(witness.bytes() == 0);
    CHECK(heap.idle_bytes() == 0);
    CHECK(peer_mappings.size() == 2);
  }
  CHECK(small.bytes() >= kMiB);
  heap.free(kept);
}

TEST(the_longest_idle_region_is_released_first) {
  Heap heap([] { return kMiB * 16 * 150; });
  void* a = heap.allocate(66 * kMiB);
  void* b = heap.allocate(67 * kMiB);
  void* c = heap.allocate(68 * kMiB);
  const Witness first(handle_of(heap, a).segment), second(handle_of(heap, b).segment);
  for (void* data : {b, a}) heap.free(data);
  CHECK(first.bytes() && second.bytes());
  heap.free(c);
  CHECK(first.bytes() && !second.bytes());
}

TEST(idle_memory_is_released_before_an_allocation_fails) {
  const Witness* idle = nullptr;
  Heap heap([&] { return idle && idle->bytes() ? 0 : kMiB * 16 * 300; });
  void* first = heap.allocate(66 * kMiB);
  const Witness witness(handle_of(heap, first).segment);
  idle = &witness;
  CHECK(contains(error_of([&] { heap.allocate(100 * kMiB); }), "cannot reserve"));
  idle = nullptr;
  heap.free(first);
  CHECK(witness.bytes() >= 66 * kMiB);
  idle = &witness;
  void* second = heap.allocate(100 * kMiB);
  CHECK(witness.bytes() == 0);
  heap.free(second);
}

TEST(a_handle_outside_its_region_is_refused) {
  PeerMappings peer_mappings(kNotAborted);
  void* data = Heap::instance().allocate(64);
  BufferHandle buffer = Heap::instance().find(data, 64);
  CHECK(peer_mappings.map(buffer, 64) != nullptr);
  CHECK(!error_of([&] { peer_mappings.map(buffer, buffer.segment.bytes); }).empty());
  buffer.offset = UINT64_MAX;
  CHECK(!error_of([&] { peer_mappings.map(buffer, 64); }).empty());
  Heap::instance().free(data);
}

TEST(memory_that_is_held_stays_mapped) {
  Heap heap([] { return uint64_t{1024} * kMiB; });
  void* data = heap.allocate(65 * kMiB);
  std::memset(data, 7, 65 * kMiB);
  std::shared_ptr<char> held;
  {
    PeerMappings peer_mappings(kNotAborted);
    held = peer_mappings.hold(handle_of(heap, data), 65 * kMiB);
    CHECK(held.get() == peer_mappings.map(handle_of(heap, data), 65 * kMiB));
    CHECK(held.get() != data && held.get()[65 * kMiB - 1] == 7);
    heap.free(data);  // releases the region: its mapping is removed with the next one
    data = heap.allocate(64);
    peer_mappings.map(handle_of(heap, data), 64);
    CHECK(peer_mappings.size() == 1);
  }
  CHECK(held.get()[0] == 0);  // mapped, though the owner and the mappings are gone
  heap.free(data);
}

TEST(an_aborted_group_unmaps_nothing) {
  std::atomic<uint32_t> failed{0};
  PeerMappings peer_mappings(failed);
  Heap heap([] { return uint64_t{1024} * kMiB; });
  void* data = heap.allocate(65 * kMiB);
  char* there = peer_mappings.map(handle_of(heap, data), 65 * kMiB);
  failed = 2;
  heap.free(data);
  void* other = heap.allocate(64);
  peer_mappings.map(handle_of(heap, other), 64);
  CHECK(peer_mappings.size() == 2);
  CHECK(there[65 * kMiB - 1] == 0);  // a late thread reads zeros, and does not crash
  failed = 0;
  void* third = heap.allocate(65 * kMiB);
  peer_mappings.map(handle_of(heap, third), 64);
  CHECK(peer_mappings.size() == 2);
  heap.free(other);
  heap.free(third);
}

TEST(a_forked_child_has_a_heap_of_its_own) {
  if (!kMayFork) return;
  void* data = Heap::instance().allocate(64);
  std::atomic<bool> is_done{false};
  std::thread busy([&] {
    while (!is_done) Heap::instance().find(data, 64);
  });
  for (int again = 0; again < 100; ++again) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      Heap::instance().free(data);  // the parent's
      if (Heap::instance().used_bytes() != 0) _exit(2);
      void* own = Heap::instance().allocate(64);
      std::memset(own, 1, 64);
      Heap::instance().free(own);
      _exit(own == data ? 3 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  is_done = true;
  busy.join();
  CHECK(Heap::instance().used_bytes() >= 64);
  Heap::instance().free(data);
}
