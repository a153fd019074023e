#include "sync.h"

#include <sched.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace lockstep {

void Flag::post(uint32_t new_value) {
  value.store(new_value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(value);
}

void Flag::increment() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(value);
}

void Flag::wake() { futex_wake_all(value); }

CoreMask allowed_cores() {
  CoreMask cores{};
  cpu_set_t set;
  static_assert(sizeof set == sizeof cores);
  if (sched_getaffinity(0, sizeof set, &set) == 0) std::memcpy(cores.data(), &set, sizeof set);
  return cores;
}

SpinPolicy SpinPolicy::choose(bool is_oversubscribed, bool is_background) {
  SpinPolicy policy;
  if (is_oversubscribed) policy.spins = 20;
  if (is_background) {
    policy.spins = is_oversubscribed ? 1 : 200;
    policy.yield_time = std::chrono::microseconds(50);
  }
  return policy;
}

void yield_core() { sched_yield(); }

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds limit) {
  timespec time;
  time.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  // Not FUTEX_PRIVATE: the waiters are in several processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace lockstep
