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
