// Helpers for tests of groups: a barrier, and ranks in processes of their own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "collectives/barrier.h"

inline lockstep::CallInfo barrier_info() {
  lockstep::CallInfo info;
  info.op = lockstep::Op::barrier;
  return info;
}

inline void run_barrier(lockstep::Group& group, std::chrono::milliseconds timeout = kTestTimeout) {
  lockstep::CollectiveCall call(group, barrier_info(), timeout, false);
  lockstep::barrier(call);
}

// Returns the handle of a segment whose creator has ended.
inline lockstep::SegmentHandle handle_of_dead_process() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const lockstep::Segment segment = lockstep::Segment::create("test", 4096, 4096);
    const lockstep::SegmentHandle handle = segment.handle();
    _exit(write(ends[1], &handle, sizeof handle) == sizeof handle ? 0 : 1);
  }
  lockstep::SegmentHandle handle;
  CHECK(read(ends[0], &handle, sizeof handle) == sizeof handle);
  CHECK(waitpid(child, nullptr, 0) == child);
  close(ends[0]);
  close(ends[1]);
  return handle;
}

// Forks a process that is rank 1 of a group of two, runs `body` there and exits.
inline pid_t fork_rank_one(const lockstep::SegmentHandle& handle,
                           const std::function<void(lockstep::Group&)>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  auto group = lockstep::Group::attach(1, 2, handle, {});
  body(*group);
  _exit(0);
}

// Forks a process that is rank 1 of a group of two, passes one barrier and waits to be killed.
inline pid_t fork_idle_rank_one(lockstep::Group& group) {
  const pid_t child = fork_rank_one(group.segment()->handle(), [](lockstep::Group& other) {
    run_barrier(other);
    pause();
  });
  if (child != 0) run_barrier(group);
  return child;
}
