// Waiting for another rank: a flag in shared memory, and how long to spin on it.
//
//     writer                             waiter
//     value.store(v)                     spin    a few microseconds, core to itself
//     if (sleepers) futex wake           yield   let the other rank of this core run
//                                        sleep   futex, in slices, until woken
//
// A sleeper counts itself, looks again and only then sleeps on the value that it
// saw; the writer stores first and looks for sleepers after. Both orders are
// sequentially consistent, so one of the two always sees the other.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLine = 64;  // bytes of a cache line

// One writer, any number of waiters; counts up and may wrap.
struct alignas(kLine) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void post(uint32_t now);
  // Counts one up; for flags that several threads ring.
  void ring();
  void wake();
};
static_assert(sizeof(Flag) == kLine);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Whether a counter that may wrap has come to `target`.
inline bool reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

// The cores that a rank may run on, one bit each.
constexpr int kCoreWords = 16;
using Cores = std::array<uint64_t, kCoreWords>;
Cores usable_cores();  // of this process at present

// How a waiter spends its time. Ranks that share cores yield at once; a thread in
// the background must not take a core from compute for long.
struct Patience {
  int spins = 500;                           // about 15 us: the other rank may need this core
  std::chrono::microseconds yielding{300};   // then give the core away, but come back
  static Patience of(bool crowded, bool background);
};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

void yield_core();

// Sleeps while `word` holds `seen`, for at most `limit`; may wake early.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds limit);
void futex_wake_all(std::atomic<uint32_t>& word);

// What a waiter looks at besides its flag. `check` throws to end the wait; it is
// called at every slice and about every millisecond while yielding.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void check() = 0;           // deadline, dead ranks
  virtual bool stopped() const = 0;   // one load: has somebody aborted the group?
  virtual void idle() {}              // called again and again once spinning was in vain
  virtual void rest(bool) {}          // about to sleep; awake again
};

constexpr std::chrono::milliseconds kSlice{20};

// Waits until `ready(flag value)`; throws what the watch throws.
template <typename Ready>
void wait_for(Flag& flag, Ready ready, const Patience& patience, Watch& watch) {
  for (int spin = 0; spin < patience.spins; ++spin) {
    if (ready(flag.value.load(std::memory_order_acquire))) return;
    if ((spin & 63) == 63 && watch.stopped()) watch.check();
    relax();
  }
  const auto until = Clock::now() + patience.yielding;
  while (true) {
    if (ready(flag.value.load(std::memory_order_acquire))) return;
    if (watch.stopped()) watch.check();
    if (Clock::now() >= until) break;
    watch.idle();
    yield_core();
  }
  struct Sleeper {
    Flag& flag;
    Watch& watch;
    Sleeper(Flag& f, Watch& w) : flag(f), watch(w) {
      watch.rest(true);
      flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Sleeper() {
      flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      watch.rest(false);
    }
  } sleeper(flag, watch);
  while (true) {
    const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (ready(seen)) return;
    watch.check();
    watch.idle();
    futex_sleep(flag.value, seen, kSlice);
  }
}

}  // namespace lockstep
