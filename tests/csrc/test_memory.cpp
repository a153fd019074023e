// Memory: segments and who may attach them, the heap and its neighbours.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "check.h"
#include "failure.h"
#include "heap.h"
#include "layout.h"
#include "neighbours.h"

using namespace lockstep;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// How much memory the file behind a segment of this process has, also when its owner is gone.
class Witness {
 public:
  explicit Witness(const Address& address)
      : fd_(open(("/proc/self/fd/" + std::to_string(address.fd)).c_str(), O_RDWR | O_CLOEXEC)) {
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

const std::atomic<uint32_t> kGroupIsFine{0};

Place place_of(Heap& heap, void* data) { return heap.find(data, 1); }

}  // namespace

// ---- segments ----

TEST(an_attached_segment_is_proven) {
  auto group = Group::create(2, {});
  Address address = group->segment()->address();
  address.nonce.low ^= 1;
  CHECK(contains(failure([&] { Group::attach(1, 2, address, {}); }), "proof"));
  address = group->segment()->address();
  address.bytes += 4096;
  CHECK(contains(failure([&] { Group::attach(1, 2, address, {}); }), "another file"));
  address.fd = 100000;
  CHECK(contains(failure([&] { Group::attach(1, 2, address, {}); }), "could not be opened"));
}

TEST(a_file_that_could_shrink_is_not_attached) {
  Segment real = Segment::create("test", 4096, 4096);
  CHECK(ftruncate(real.address().fd, 0) != 0);
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(write(fd, real.data(), 4096) == 4096);
  Address address = real.address();
  address.fd = fd;
  CHECK(contains(failure([&] { Segment::attach(address); }), "another file"));
  close(fd);
}

TEST(another_user_attaches_nothing_and_is_not_attached) {
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
    const std::string told = failure([&] { Segment::attach(mine.address()); });
    const Segment other = Segment::create("test", 4096, 4096);
    const Address address = other.address();
    char go;
    if (write(to_parent[1], &address, sizeof address) != sizeof address) _exit(3);
    if (read(to_child[0], &go, 1) != 1) _exit(4);
    _exit(contains(told, "could not be opened") ? 0 : 5);
  }
  Address address;
  CHECK(read(to_parent[0], &address, sizeof address) == sizeof address);
  CHECK(contains(failure([&] { Segment::attach(address); }), "another user"));
  CHECK(write(to_child[1], "x", 1) == 1);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(fd);
}

TEST(too_little_memory_is_an_error_and_no_signal) {
  // 4 EiB fit in no machine.
  for (const uint64_t bytes : {uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - 63}) {
    const std::string told = "there are not " + mebibytes(bytes);
    CHECK(contains(failure([&] { Segment::create("test", bytes, 4096); }), told));
    CHECK(contains(failure([&] { Segment::create("test", bytes, bytes); }), told));
    CHECK(contains(failure([&] { Heap().allocate(bytes); }), "there are not"));
  }
}

TEST(memory_that_runs_out_meanwhile_is_given_back) {
  Segment segment = Segment::create("test", 64 * kMiB, 4096);
  const Witness witness(segment.address());
  const uint64_t before = witness.bytes();
  uint64_t most = 0;
  // Another rank takes as much at the same time.
  uint64_t left = 90 * kMiB;
  const auto asked = [&] {
    most = std::max(most, witness.bytes());
    return left -= 8 * kMiB;
  };
  CHECK(contains(failure([&] { segment.reserve(4096, 32 * kMiB, asked); }),
                 "there are not 32 MiB of memory for shared tensors, only "));
  CHECK(most > before + 4 * kMiB);
  CHECK(witness.bytes() == before);
}

// ---- layouts ----

TEST(impossible_sizes_are_refused) {
  auto group = Group::create(2, {});
  Header& header = group->header();
  const Layout good = group->layout();
  const auto refused = [&](uint64_t& size, uint64_t value) {
    const uint64_t before = size;
    size = value;
    CHECK(contains(failure([&] { Group::attach(1, 2, group->segment(), {}); }), "impossible"));
    size = before;
  };
  for (uint64_t* size : {&header.slot_bytes, &header.stage_bytes, &header.cell_bytes, &header.lane_bytes})
    for (const uint64_t value : {uint64_t{0}, uint64_t{8}, *size + 8, uint64_t{1} << 29, UINT64_MAX})
      refused(*size, value);
  refused(header.slot_bytes, 64);
  refused(header.stage_bytes, 64);
  CHECK(Layout::read(header, good.total()).total() == good.total());
}

TEST(a_group_of_any_size_has_a_moderate_memory_of_its_own) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    const Layout layout = Layout::chosen(ranks);
    Header header;
    layout.write(header);
    CHECK(Layout::read(header, layout.total()).total() == layout.total());
    CHECK(layout.total() < 64 * kMiB);
  }
}

// ---- the heap ----

TEST(the_heap_reuses_and_merges_its_blocks) {
  Heap& heap = Heap::here();
  const uint64_t before = heap.used();
  char* a = static_cast<char*>(heap.allocate(1000));
  char* b = static_cast<char*>(heap.allocate(1000));
  CHECK(heap.find(a + 10, 100).shared());
  CHECK(!heap.find(a + 1000, 2000).shared());
  CHECK(!heap.find(&before, 8).shared());
  heap.free(a);
  heap.free(b);
  char* c = static_cast<char*>(heap.allocate(2000));
  CHECK(c == a);
  heap.free(c);
  CHECK(heap.used() == before);
}

TEST(a_large_tensor_gets_the_memory_of_the_last_one) {
  Heap heap([] { return 16 * 200 * kMiB; });
  char* first = static_cast<char*>(heap.allocate(66 * kMiB));
  heap.free(first);
  CHECK(heap.idle() >= 66 * kMiB);
  char* small = static_cast<char*>(heap.allocate(kMiB));
  CHECK(!(small >= first && small < first + 66 * kMiB));
  char* second = static_cast<char*>(heap.allocate(65 * kMiB));
  CHECK(second == first);
  CHECK(heap.used() == 66 * kMiB);
  heap.free(second);
  heap.free(small);
}

TEST(memory_of_large_tensors_goes_back_to_the_system) {
  Heap heap([] { return 1024 * kMiB; });  // a sixteenth is a region
  Neighbours neighbours(kGroupIsFine);
  void* kept = heap.allocate(kMiB);
  const Witness small(place_of(heap, kept).address);
  neighbours.at(place_of(heap, kept), kMiB);
  for (int again = 0; again < 3; ++again) {
    void* data = heap.allocate(65 * kMiB);
    const Place place = place_of(heap, data);
    const Witness witness(place.address);
    // The neighbour has the same memory, and touches it.
    char* there = neighbours.at(place, 65 * kMiB);
    std::memset(data, 1 + again, 4096);
    CHECK(there[0] == 1 + again);
    CHECK(witness.bytes() >= 65 * kMiB);
    heap.free(data);
    CHECK(witness.bytes() == 0);
    CHECK(heap.idle() == 0);
    CHECK(neighbours.mappings() == 2);
  }
  CHECK(small.bytes() >= kMiB);
  heap.free(kept);
}

TEST(what_was_idle_longest_goes_first) {
  Heap heap([] { return 16 * 150 * kMiB; });
  void* a = heap.allocate(66 * kMiB);
  void* b = heap.allocate(67 * kMiB);
  void* c = heap.allocate(68 * kMiB);
  const Witness first(place_of(heap, a).address), second(place_of(heap, b).address);
  for (void* data : {b, a}) heap.free(data);
  CHECK(first.bytes() && second.bytes());
  heap.free(c);
  CHECK(first.bytes() && !second.bytes());
}

TEST(idle_memory_goes_back_before_there_is_too_little) {
  const Witness* idle = nullptr;
  Heap heap([&] { return idle && idle->bytes() ? 0 : 16 * 300 * kMiB; });
  void* first = heap.allocate(66 * kMiB);
  const Witness witness(place_of(heap, first).address);
  idle = &witness;
  CHECK(contains(failure([&] { heap.allocate(100 * kMiB); }), "there are not"));
  idle = nullptr;
  heap.free(first);
  CHECK(witness.bytes() >= 66 * kMiB);
  idle = &witness;
  void* second = heap.allocate(100 * kMiB);
  CHECK(witness.bytes() == 0);
  heap.free(second);
}

TEST(a_place_outside_its_region_is_refused) {
  Neighbours neighbours(kGroupIsFine);
  void* data = Heap::here().allocate(64);
  Place place = Heap::here().find(data, 64);
  CHECK(neighbours.at(place, 64) != nullptr);
  CHECK(!failure([&] { neighbours.at(place, place.address.bytes); }).empty());
  place.offset = UINT64_MAX;
  CHECK(!failure([&] { neighbours.at(place, 64); }).empty());
  Heap::here().free(data);
}

TEST(a_failed_group_unmaps_nothing) {
  std::atomic<uint32_t> failed{0};
  Neighbours neighbours(failed);
  Heap heap([] { return uint64_t{1024} * kMiB; });
  void* data = heap.allocate(65 * kMiB);
  char* there = neighbours.at(place_of(heap, data), 65 * kMiB);
  failed = 2;
  heap.free(data);
  void* other = heap.allocate(64);
  neighbours.at(place_of(heap, other), 64);
  CHECK(neighbours.mappings() == 2);
  CHECK(there[65 * kMiB - 1] == 0);  // a late thread reads nothing, and does not fall
  failed = 0;
  void* third = heap.allocate(65 * kMiB);
  neighbours.at(place_of(heap, third), 64);
  CHECK(neighbours.mappings() == 2);
  heap.free(other);
  heap.free(third);
}

TEST(a_child_forked_in_the_middle_has_a_heap_of_its_own) {
  if (!kMayFork) return;
  void* data = Heap::here().allocate(64);
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) Heap::here().find(data, 64);
  });
  for (int again = 0; again < 100; ++again) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      Heap::here().free(data);  // the parent's
      if (Heap::here().used() != 0) _exit(2);
      void* own = Heap::here().allocate(64);
      std::memset(own, 1, 64);
      Heap::here().free(own);
      _exit(own == data ? 3 : 0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  over = true;
  busy.join();
  CHECK(Heap::here().used() >= 64);
  Heap::here().free(data);
}
