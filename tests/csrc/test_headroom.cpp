// What is left of memory, read from files that look like a system's.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "headroom.h"

using namespace lockstep;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A folder that looks like a system's /proc and /sys, gone at the end.
class System {
 public:
  System() {
    root_ = std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX";
    CHECK(mkdtemp(root_.data()));
    write("/proc/meminfo", "MemTotal: 999 kB\nMemAvailable:   4096 kB\nCached: 7 kB\n");
  }
  ~System() { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  // Puts this process into a group of one version, mounted as a machine does it.
  void second_version(const std::string& group, const std::string& top = "/") {
    write("/proc/self/cgroup", "0::" + group + "\n");
    write("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n30 23 0:26 " + top +
                                      " /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void first_version(const std::string& group, const std::string& top = "/") {
    write("/proc/self/cgroup", "9:name=systemd:/other\n5:cpu,memory:" + group + "\n0::/\n");
    write("/proc/self/mountinfo",
          "34 31 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
          "35 31 0:29 " + top + " /mnt/memory rw shared:9 - cgroup cgroup rw,cpu,memory\n");
  }
  uint64_t left() const { return headroom(root_); }

 private:
  std::string root_;
};

}  // namespace

TEST(the_machine_says_what_is_left) {
  System system;
  CHECK(system.left() == 4 * kMiB);
  system.write("/proc/meminfo", "nothing that is known\n");
  CHECK(system.left() == UINT64_MAX);
}

TEST(a_limit_of_any_group_above_counts) {
  System system;
  system.second_version("/job/rank");
  system.write("/sys/fs/cgroup/job/rank/memory.max", "max\n");
  system.write("/sys/fs/cgroup/job/rank/memory.current", "1048576\n");
  CHECK(system.left() == 4 * kMiB);
  system.write("/sys/fs/cgroup/job/memory.max", "3145728\n");
  system.write("/sys/fs/cgroup/job/memory.current", "1048576\n");
  CHECK(system.left() == 2 * kMiB);
  system.write("/sys/fs/cgroup/job/rank/memory.max", "2097152\n");
  CHECK(system.left() == 1 * kMiB);
  system.write("/sys/fs/cgroup/memory.max", "1000\n");
  system.write("/sys/fs/cgroup/memory.current", "2000\n");
  CHECK(system.left() == 0);
}

TEST(files_that_were_read_do_not_count_as_used) {
  System system;
  system.second_version("/job");
  system.write("/sys/fs/cgroup/job/memory.max", "3145728\n");
  system.write("/sys/fs/cgroup/job/memory.current", "3145728\n");
  CHECK(system.left() == 0);
  // Shared memory counts as a file, but not among these two.
  system.write("/sys/fs/cgroup/job/memory.stat",
               "file 3145728\nshmem 1048576\ninactive_file 1500000\nactive_file 500000\n");
  CHECK(system.left() == 2000000);
}

TEST(the_first_version_of_control_groups_is_read_where_the_process_is) {
  System system;
  system.first_version("/slurm/job_7");
  system.write("/mnt/memory/memory.limit_in_bytes", "9223372036854771712\n");
  system.write("/mnt/memory/slurm/job_7/memory.limit_in_bytes", "3145728\n");
  system.write("/mnt/memory/slurm/job_7/memory.usage_in_bytes", "2097152\n");
  CHECK(system.left() == kMiB);
  system.write("/mnt/memory/slurm/job_7/memory.stat",
               "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 24\n");
  CHECK(system.left() == kMiB + 1024);
}

TEST(a_container_sees_the_limit_of_its_own_group) {
  System system;
  // The path is the machine's; mounted is that folder alone, at the top.
  system.second_version("/docker/1234", "/docker/1234");
  system.write("/sys/fs/cgroup/memory.max", "1048576\n");
  system.write("/sys/fs/cgroup/memory.current", "1024\n");
  CHECK(system.left() == kMiB - 1024);
  system.second_version("/docker/1234/rank", "/docker/1234");
  system.write("/sys/fs/cgroup/rank/memory.max", "4096\n");
  CHECK(system.left() == 4096);
  system.first_version("/docker/1234", "/docker/1234");
  system.write("/mnt/memory/memory.limit_in_bytes", "2097152\n");
  system.write("/mnt/memory/memory.usage_in_bytes", "1024\n");
  CHECK(system.left() == 2 * kMiB - 1024);
}

TEST(something_is_left_on_this_machine) {
  CHECK(headroom() > 0);
  CHECK(headroom() < UINT64_MAX);
}
