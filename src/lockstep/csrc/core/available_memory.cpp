#include "available_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace lockstep {
namespace {

// The names of a control group's files, which differ between the two versions.
struct FileNames {
  const char *limit, *usage, *inactive, *active;
};
constexpr FileNames kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                              "total_inactive_file", "total_active_file"};
constexpr FileNames kVersion2{"/memory.max", "/memory.current", "inactive_file", "active_file"};

constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // version 1 shows a huge number for no limit

// Where the control groups of one version are mounted, and which group is mounted there.
struct Mount {
  std::string point, root_group;
};

// Returns the number after `key` at the start of a line of a file, or `fallback`.
uint64_t read_field(const std::string& path, const std::string& key, uint64_t fallback) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.rfind(key + " ", 0) == 0) return std::strtoull(line.c_str() + key.size(), nullptr, 10);
  return fallback;
}

// Returns the number in a file, or `fallback` if there is none ("max" is not a number).
uint64_t read_number(const std::string& path, uint64_t fallback) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : fallback;
}

uint64_t available_in_group(const std::string& folder, const FileNames& names) {
  const uint64_t limit = read_number(folder + names.limit, kUnlimited);
  if (limit >= kUnlimited) return UINT64_MAX;
  const uint64_t usage = read_number(folder + names.usage, 0);
  const std::string statistics = folder + "/memory.stat";
  const uint64_t cache =
      read_field(statistics, names.inactive, 0) + read_field(statistics, names.active, 0);
  const uint64_t held = usage - std::min(usage, cache);
  return limit - std::min(limit, held);
}

bool lists_memory_controller(const std::string& list) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');)
    if (word == "memory") return true;
  return false;
}

// A line of mountinfo: id parent device top point options ... - type source options
Mount find_mount(const std::string& root, bool is_version2) {
  const std::string type = is_version2 ? " - cgroup2 " : " - cgroup ";
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(type);
    if (dash == std::string::npos) continue;
    if (!is_version2 && !lists_memory_controller(line.substr(line.rfind(' ') + 1))) continue;
    std::istringstream words(line);
    std::string id, parent, device;
    Mount mount;
    words >> id >> parent >> device >> mount.root_group >> mount.point;
    return mount;
  }
  return {};
}

// Returns the minimum over the group at `path` and all groups above it. In a container
// that has mounted only its own group, that one is the topmost visible group.
uint64_t available_in_ancestors(const std::string& root, const Mount& mount, std::string path,
                                const FileNames& names) {
  if (mount.root_group != "/" && path.rfind(mount.root_group, 0) == 0)
    path.erase(0, mount.root_group.size());
  uint64_t available = UINT64_MAX;
  while (true) {
    available = std::min(available, available_in_group(root + mount.point + path, names));
    if (path.empty()) return available;
    const size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
}

}  // namespace

uint64_t available_memory(const std::string& root) {
  const uint64_t kibibytes = read_field(root + "/proc/meminfo", "MemAvailable:", UINT64_MAX);
  uint64_t available = kibibytes == UINT64_MAX ? kibibytes : kibibytes << 10;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" in version 2, "5:cpu,memory:/a/b" in version 1
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos) continue;
    const bool is_version2 = two == one + 1;
    if (!is_version2 && !lists_memory_controller(line.substr(one + 1, two - one - 1))) continue;
    const Mount mount = find_mount(root, is_version2);
    if (!mount.point.empty())
      available = std::min(available, available_in_ancestors(root, mount, line.substr(two + 1),
                                                             is_version2 ? kVersion2 : kVersion1));
  }
  return available;
}

}  // namespace lockstep
