// What this process does and waits for, written where its launcher can read it.
//
// The launcher gives every rank one page of memory that both have mapped; it never signals
// or stops a rank to read it. The first half is described in lockstep/comm/activity.py,
// which also reads what is written here:
//
//     2048   LastCall      the last collective call or message that began
//     2304   CurrentWait   what a thread has been waiting for since it fell asleep
//
// These are guarded by a sequence number that is odd while they are written. Beginning a
// call costs a few stores and no system call; waits are written only by threads that
// are about to sleep. A process without a launcher writes to private memory, and so does
// a forked child.
#pragma once

#include <cstdint>
#include <string>

#include "sync.h"

namespace lockstep {

constexpr uint64_t kActivityPageBytes = 4096;

struct LastCall {
  std::atomic<uint32_t> sequence;
  int32_t peer;  // global rank at the other end of a message; -1: any rank, or a collective
  int64_t begun_ns;
  uint64_t number;  // of the collective call in its group, from 1; 0: a message
  uint64_t count;   // elements
  char op[16];
  char group[48];
};

// What a thread waits in; `CallKind` in lockstep/comm/activity.py.
enum class CallKind : uint32_t { other, collective, receive, send };

struct CurrentWait {
  std::atomic<uint32_t> sequence;
  uint32_t in_main_thread;  // 0: only background threads wait
  int64_t since_ns;         // 0: no thread waits
  int32_t awaited;          // the global rank; or kAllOthers, kNotSaid
  CallKind kind;
  char text[512];
};

constexpr int32_t kAllOthers = -1, kNotSaid = -2;

// Publishes which micro-batch begins, in the first half of the page, as Python does: `step` is the
// number of the step, or -1 - n in batch n of an evaluation.
void publish_microbatch(int64_t step, int64_t microbatch);

// Makes later publications go to this page, which stays mapped as long as the process lives.
void set_activity_page(uint64_t address);

// Publishes that a call begins. If several threads do so at once, one of them wins.
void publish_call(const char* op, int peer, uint64_t number, uint64_t count,
                  const std::string& group, Clock::time_point begun);

// Publishes that the calling thread waits, until `end_wait`. Calls may nest. An empty
// `what` stands for what another thread of this process waits for. `awaited` is for a launcher
// that replaces ranks which go on waiting for a lost one.
void begin_wait(const std::string& what, Clock::time_point since, int32_t awaited = kNotSaid,
                CallKind kind = CallKind::other);
void end_wait();

// The wait of a thread for another thread of this process, which waits for other ranks.
class SleepScope {
 public:
  ~SleepScope() {
    if (has_begun_) end_wait();
  }
  void begin() {  // may be called repeatedly
    if (!has_begun_) begin_wait("", Clock::now());
    has_begun_ = true;
  }

 private:
  bool has_begun_ = false;
};

}  // namespace lockstep
