// How much memory this process can still get. The kernel kills a process that takes more
// instead of failing its allocation, so large allocations check first.
//
//     the machine           MemAvailable
//     /                     limit - usage + page cache     every control group from the
//       job.slice           limit - usage + page cache     process's own up to the root
//         rank.scope        limit - usage + page cache     of what is mounted
//                           the result is the minimum
//
// The usage of a control group includes the pages of files that were read. The kernel
// reclaims those by itself, so they count as available.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Returns the bytes available to this process, or UINT64_MAX if the kernel does not say.
// `root` is prepended to the paths of the kernel's files (for tests).
uint64_t available_memory(const std::string& root = "");

}  // namespace lockstep
