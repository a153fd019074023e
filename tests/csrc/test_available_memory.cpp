// The available memory, read from made-up files of a system.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "available_memory.h"
#include "check.h"

using namespace lockstep;

namespace {

// A temporary folder with a system's /proc and /sys.
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
  // Puts this process into a control group of version 1 or 2.
  void use_version2(const std::string& group, const std::string& top = "/") {
    write("/proc/self/cgroup", "0::" + group + "\n");
    write("/proc/self/mountinfo",
          "22 27 0:21 / /proc rw - proc proc rw\n30 23 0:26 " + top +
              " /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void use_version1(const std::string& group, const std::string& top = "/") {
    write("/proc/self/cgroup", "9:name=systemd:/other\n5:cpu,memory:" + group + "\n0::/\n");
    write("/proc/self/mountinfo",
          "34 31 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
          "35 31 0:29 " +
              top + " /mnt/memory rw shared:9 - cgroup cgroup rw,cpu,memory\n");
  }
  uint64_t available() const { return available_memory(root_); }

 private:
  std::string root_;
};

}  // namespace

TEST(available_memory_is_read_from_meminfo) {
  System system;
  CHECK(system.available() == 4 * kMiB);
  system.write("/proc/meminfo", "nothing that is known\n");
  CHECK(system.available() == UINT64_MAX);
}

TEST(the_limits_of_all_ancestor_groups_count) {
  System system;
  system.use_version2("/job/rank");
  system.write("/sys/fs/cgroup/job/rank/memory.max", "max\n");
  system.write("/sys/fs/cgroup/job/rank/memory.current", "1048576\n");
  CHECK(system.available() == 4 * kMiB);
  system.write("/sys/fs/cgroup/job/memory.max", "3145728\n");
  system.write("/sys/fs/cgroup/job/memory.current", "1048576\n");
  CHECK(system.available() == 2 * kMiB);
  system.write("/sys/fs/cgroup/job/rank/memory.max", "2097152\n");
  CHECK(system.available() == 1 * kMiB);
  system.write("/sys/fs/cgroup/memory.max", "1000\n");
  system.write("/sys/fs/cgroup/memory.current", "2000\n");
  CHECK(system.available() == 0);
}

TEST(the_page_cache_counts_as_available) {
  System system;
  system.use_version2("/job");
  system.write("/sys/fs/cgroup/job/memory.max", "3145728\n");
  system.write("/sys/fs/cgroup/job/memory.current", "3145728\n");
  CHECK(system.available() == 0);
  // Shared memory counts as `file`, but not as inactive_file or active_file.
  system.write("/sys/fs/cgroup/job/memory.stat",
               "file 3145728\nshmem 1048576\ninactive_file 1500000\nactive_file 500000\n");
  CHECK(system.available() == 2000000);
}

TEST(control_groups_of_version_1_are_read) {
  System system;
  system.use_version1("/slurm/job_7");
  system.write("/mnt/memory/memory.limit_in_bytes", "9223372036854771712\n");
  system.write("/mnt/memory/slurm/job_7/memory.limit_in_bytes", "3145728\n");
  system.write("/mnt/memory/slurm/job_7/memory.usage_in_bytes", "2097152\n");
  CHECK(system.available() == kMiB);
  system.write("/mnt/memory/slurm/job_7/memory.stat",
               "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 24\n");
  CHECK(system.available() == kMiB + 1024);
}

TEST(a_container_sees_the_limit_of_its_own_group) {
  System system;
  // The path is the host's, but only that group is mounted, at the top.
  system.use_version2("/docker/1234", "/docker/1234");
  system.write("/sys/fs/cgroup/memory.max", "1048576\n");
  system.write("/sys/fs/cgroup/memory.current", "1024\n");
  CHECK(system.available() == kMiB - 1024);
  system.use_version2("/docker/1234/rank", "/docker/1234");
  system.write("/sys/fs/cgroup/rank/memory.max", "4096\n");
  CHECK(system.available() == 4096);
  system.use_version1("/docker/1234", "/docker/1234");
  system.write("/mnt/memory/memory.limit_in_bytes", "2097152\n");
  system.write("/mnt/memory/memory.usage_in_bytes", "1024\n");
  CHECK(system.available() == 2 * kMiB - 1024);
}

TEST(available_memory_is_known_on_this_machine) {
  CHECK(available_memory() > 0);
  CHECK(available_memory() < UINT64_MAX);
}
