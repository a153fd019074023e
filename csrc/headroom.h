// How much memory can still be had. A process that takes more is killed, not told,
// so whoever takes much asks first.
//
//     the machine           MemAvailable
//     /                     limit - used + page cache      every control group from the
//       job.slice           limit - used + page cache      process's own up to the root
//         rank.scope        limit - used + page cache      of what is mounted
//                           the least of all is left
//
// What a group has used includes the pages of files that were read; the kernel takes
// those back by itself, so they count as free.
#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

// Bytes that are left to this process at present; UINT64_MAX where nothing says.
// Files of the kernel are looked for below `root`.
uint64_t headroom(const std::string& root = "");

}  // namespace lockstep
