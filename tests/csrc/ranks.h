// What tests of groups share: meeting, and a rank that is a process of its own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "collectives/barrier.h"

inline lockstep::Call barrier_call() {
  lockstep::Call call;
  call.op = lockstep::Op::barrier;
  return call;
}

inline void meet(lockstep::Group& group, std::chrono::milliseconds timeout = kPatience) {
  lockstep::Turn turn(group, barrier_call(), timeout, false);
  lockstep::barrier(turn);
}

// Forks a process that is rank 1 of a group of two, runs `body` there and exits.
inline pid_t rank_one(const lockstep::Address& address,
                      const std::function<void(lockstep::Group&)>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  auto group = lockstep::Group::attach(1, 2, address, {});
  body(*group);
  _exit(0);
}

// A process that is rank 1 of a group of two, has met it once and waits to be killed.
inline pid_t idle_rank_one(lockstep::Group& group) {
  const pid_t child = rank_one(group.segment()->address(), [](lockstep::Group& other) {
    meet(other);
    pause();
  });
  if (child != 0) meet(group);
  return child;
}
