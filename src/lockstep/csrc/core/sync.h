// Waiting for another rank: a flag in shared memory, and how long to spin on it.
//
//     writer                             waiter
//     value.store(v)                     spin    for a few microseconds, on its core
//     if (sleepers) futex wake           yield   let another rank on this core run
//                                        sleep   on a futex, in slices, until woken
//
// A sleeper increments `sleepers`, reads the value again and only then sleeps on the
// value it has read; the writer stores the value first and reads `sleepers` after.
// Both orders are sequentially consistent, so one of the two always sees the other.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace lockstep {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kCacheLine = 64;  // bytes of a cache line

inline std::size_t round_to_lines(std::size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// A counter with one writer and any number of waiters. It may wrap.
struct alignas(kCacheLine) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void post(uint32_t new_value);
  void increment();  // for flags that several threads write
  void wake();       // wakes all sleepers without changing the value
};
static_assert(sizeof(Flag) == kCacheLine);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Whether a counter that may wrap has reached `target`.
inline bool reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

// The cores that a rank may run on, one bit per core.
constexpr int kCoreMaskWords = 16;
using CoreMask = std::array<uint64_t, kCoreMaskWords>;
CoreMask allowed_cores();  // of this process, as of now

// How long a waiter spins and yields before it sleeps. Ranks that share cores yield
// almost at once; a background thread must not keep a core from computing for long.
// In virtual machines with few cores, waking a sleeping process takes 50 to 100 us, and a
// cache line from another core 1 us; 4,000 spins take 110 us. Ranks that share a core pay
// for every spin: an all-reduce of 4 bytes took 200 us instead of 6.
struct SpinPolicy {
  int spins = 500;  // about 15 us
  std::chrono::microseconds yield_time{300};
  static SpinPolicy choose(bool is_oversubscribed, bool is_background);
};

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

void yield_core();

// Sleeps while `word` holds `seen`, for at most `limit`. May wake spuriously.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds limit);
void futex_wake_all(std::atomic<uint32_t>& word);

// What a waiter does in addition to reading its flag. `check` throws to end the wait; it is
// called before every slice of sleep.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  virtual void check() = 0;             // timeout, signals, dead ranks
  virtual bool is_stopped() const = 0;  // whether the group was aborted; one load
  virtual void on_idle() {}             // called repeatedly after the spinning phase
  virtual void on_sleep(bool) {}        // true: about to sleep; false: awake again
};

constexpr std::chrono::milliseconds kSleepSlice{20};

// Waits until `ready(flag value)` is true. Throws what the observer throws.
template <typename Ready>
void wait_for(Flag& flag, Ready ready, const SpinPolicy& policy, WaitObserver& observer) {
  for (int spin = 0; spin < policy.spins; ++spin) {
    if (ready(flag.value.load(std::memory_order_acquire))) return;
    if ((spin & 63) == 63 && observer.is_stopped()) observer.check();
    cpu_pause();
  }
  const auto until = Clock::now() + policy.yield_time;
  while (true) {
    if (ready(flag.value.load(std::memory_order_acquire))) return;
    if (observer.is_stopped()) observer.check();
    if (Clock::now() >= until) break;
    observer.on_idle();
    yield_core();
  }
  struct Sleeper {
    Flag& flag;
    WaitObserver& observer;
    Sleeper(Flag& f, WaitObserver& w) : flag(f), observer(w) {
      observer.on_sleep(true);
      flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() {
      flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      observer.on_sleep(false);
    }
  } sleeper(flag, observer);
  while (true) {
    const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (ready(seen)) return;
    observer.check();
    observer.on_idle();
    futex_sleep(flag.value, seen, kSleepSlice);
  }
}

}  // namespace lockstep
