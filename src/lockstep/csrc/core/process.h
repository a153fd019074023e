// The id of this process.
//
// A forked child inherits its parent's objects and the mappings of memory that the parent
// shares with other ranks, but none of its threads; locks stay as they were at the fork.
// Objects that belong to one process therefore store `current_pid()` and compare it.
#pragma once

namespace lockstep {

int current_pid();  // getpid() without the system call

}  // namespace lockstep
