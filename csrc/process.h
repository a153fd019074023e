// Which process this is.
//
// A forked child inherits its parent's objects and maps the memory that the parent shares
// with the other ranks, but has none of its threads; locks stay as they were at the fork.
// Objects that belong to one process therefore store `this_process()` and compare.
#pragma once

namespace lockstep {

int this_process();  // getpid() without the system call

}  // namespace lockstep
