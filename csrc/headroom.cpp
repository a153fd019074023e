#include "headroom.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace lockstep {
namespace {

// The files of a control group's folder, in the two versions of control groups.
struct Names {
  const char *limit, *used, *inactive, *active;
};
constexpr Names kFirstVersion{"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                              "total_inactive_file", "total_active_file"};
constexpr Names kSecondVersion{"/memory.max", "/memory.current", "inactive_file", "active_file"};

constexpr uint64_t kNone = uint64_t{1} << 62;  // the first version has no word for no limit

// Where the folders of one version are mounted, and which of them is the mount's own.
struct Mount {
  std::string point, top;
};

// The number after `word` at the start of a line, or `otherwise`.
uint64_t number_after(const std::string& path, const std::string& word, uint64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.rfind(word + " ", 0) == 0) return std::strtoull(line.c_str() + word.size(), nullptr, 10);
  return otherwise;
}

// The number in a file, or `otherwise`: "max" is none.
uint64_t number_in(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : otherwise;
}

uint64_t left_in(const std::string& folder, const Names& names) {
  const uint64_t limit = number_in(folder + names.limit, kNone);
  if (limit >= kNone) return UINT64_MAX;
  const uint64_t used = number_in(folder + names.used, 0);
  const std::string statistics = folder + "/memory.stat";
  const uint64_t cache = number_after(statistics, names.inactive, 0) +
                         number_after(statistics, names.active, 0);
  const uint64_t held = used - std::min(used, cache);
  return limit - std::min(limit, held);
}

bool names_memory(const std::string& list) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');)
    if (word == "memory") return true;
  return false;
}

// A line of mountinfo: id parent device top point options ... - type source options
Mount mount_of(const std::string& root, bool second) {
  const std::string type = second ? " - cgroup2 " : " - cgroup ";
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(type);
    if (dash == std::string::npos) continue;
    if (!second && !names_memory(line.substr(line.rfind(' ') + 1))) continue;
    std::istringstream words(line);
    std::string id, parent, device;
    Mount mount;
    words >> id >> parent >> device >> mount.top >> mount.point;
    return mount;
  }
  return {};
}

// The least that is left in `path` and all folders above it. Where a container has
// mounted its own folder only, that one is the uppermost that can be seen.
uint64_t left_above(const std::string& root, const Mount& mount, std::string path,
                    const Names& names) {
  if (mount.top != "/" && path.rfind(mount.top, 0) == 0) path.erase(0, mount.top.size());
  uint64_t left = UINT64_MAX;
  while (true) {
    left = std::min(left, left_in(root + mount.point + path, names));
    if (path.empty()) return left;
    const size_t slash = path.rfind('/');
    path.resize(slash == std::string::npos ? 0 : slash);
  }
}

}  // namespace

uint64_t headroom(const std::string& root) {
  const uint64_t kibibytes = number_after(root + "/proc/meminfo", "MemAvailable:", UINT64_MAX);
  uint64_t left = kibibytes == UINT64_MAX ? kibibytes : kibibytes << 10;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" in version 2, "5:cpu,memory:/a/b" in version 1
    const size_t one = line.find(':'), two = line.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos) continue;
    const bool second = two == one + 1;
    if (!second && !names_memory(line.substr(one + 1, two - one - 1))) continue;
    const Mount mount = mount_of(root, second);
    if (!mount.point.empty())
      left = std::min(left, left_above(root, mount, line.substr(two + 1),
                                       second ? kSecondVersion : kFirstVersion));
  }
  return left;
}

}  // namespace lockstep
