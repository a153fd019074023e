#include "activity.h"

#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace lockstep {

constexpr uint64_t kLastCall = 2048, kCurrentWait = 2304, kTextNumber = 4088;

struct Text {
  uint64_t number;
  int64_t since_ns;
  uint32_t state, length;
  char text[992];
  uint64_t number_again;
};
static_assert(2 * sizeof(Text) == kLastCall);
static_assert(sizeof(LastCall) <= kCurrentWait - kLastCall);
static_assert(sizeof(CurrentWait) <= kTextNumber - kCurrentWait);

alignas(kCacheLine) static char private_page[kActivityPageBytes];
static std::atomic<char*> page{private_page};

// The page of a forked child's parent says what the parent does.
[[maybe_unused]] static const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { page.store(private_page, std::memory_order_relaxed); });

void set_activity_page(uint64_t address) { page.store(reinterpret_cast<char*>(address)); }

static int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

template <typename Part>
static Part& part_at(uint64_t offset) {
  return *reinterpret_cast<Part*>(page.load(std::memory_order_relaxed) + offset);
}

// Makes the sequence odd. Returns false if another thread is writing.
static bool begin_write(std::atomic<uint32_t>& sequence) {
  uint32_t seen = sequence.load(std::memory_order_relaxed);
  if (seen % 2 != 0 || !sequence.compare_exchange_strong(seen, seen + 1, std::memory_order_acquire))
    return false;
  std::atomic_thread_fence(std::memory_order_release);
  return true;
}

static void end_write(std::atomic<uint32_t>& sequence) {
  sequence.store(sequence.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void publish_microbatch(int64_t step, int64_t microbatch) {
  char* const start = page.load(std::memory_order_relaxed);
  auto& last = *reinterpret_cast<uint64_t*>(start + kTextNumber);
  const uint64_t number = ++last;
  auto& text = part_at<Text>(number % 2 * sizeof(Text));
  text.number = number;
  std::atomic_thread_fence(std::memory_order_release);
  text.since_ns = nanoseconds(Clock::now());
  text.state = 0;  // computing
  const char* const what = step < 0 ? "evaluation" : "step";
  text.length = static_cast<uint32_t>(
      std::snprintf(text.text, sizeof(text.text), "micro-batch %lld of %s %lld",
                    static_cast<long long>(microbatch), what,
                    static_cast<long long>(step < 0 ? -1 - step : step)));
  std::atomic_thread_fence(std::memory_order_release);
  text.number_again = number;
}

template <size_t Bytes>
static void copy_name(char (&to)[Bytes], const char* from) {
  std::strncpy(to, from, Bytes - 1);
  to[Bytes - 1] = 0;
}

void publish_call(const char* op, int peer, uint64_t number, uint64_t count,
                  const std::string& group, Clock::time_point begun) {
  auto& call = part_at<LastCall>(kLastCall);
  if (!begin_write(call.sequence)) return;
  call.peer = peer;
  call.begun_ns = nanoseconds(begun);
  call.number = number;
  call.count = count;
  copy_name(call.op, op);
  copy_name(call.group, group.c_str());
  end_write(call.sequence);
}

// ---- waits ----

struct Wait {
  long thread;
  std::string what;
  Clock::time_point since;
  int32_t awaited;
  CallKind kind;
};

static std::mutex waits_mutex;
static std::vector<Wait> waits;  // of all threads, in the order in which they began

static long current_thread() {
#if defined(__linux__)
  return syscall(SYS_gettid);
#else
  return static_cast<long>(reinterpret_cast<uintptr_t>(pthread_self()));
#endif
}

// Writes the wait of the main thread, or else the oldest one. Called under the lock.
static void publish_waits() {
  const Wait* shown = nullptr;
  const Wait* named = nullptr;  // an own wait may be for that of another thread
  bool is_main = false;
  for (const Wait& wait : waits) {
    if (!named && !wait.what.empty()) named = &wait;
    if (!shown) shown = &wait;
    if (wait.thread != getpid()) continue;
    shown = &wait;
    is_main = true;
    if (!wait.what.empty()) named = &wait;
  }
  auto& current = part_at<CurrentWait>(kCurrentWait);
  if (!begin_write(current.sequence)) return;  // the page was left so by a process that died
  current.in_main_thread = is_main;
  current.since_ns = shown ? nanoseconds(shown->since) : 0;
  current.awaited = named ? named->awaited : kNotSaid;
  current.kind = named ? named->kind : CallKind::other;
  copy_name(current.text, named ? named->what.c_str() : "");
  end_write(current.sequence);
}

void begin_wait(const std::string& what, Clock::time_point since, int32_t awaited, CallKind kind) {
  std::lock_guard<std::mutex> lock(waits_mutex);
  waits.push_back({current_thread(), what, since, awaited, kind});
  publish_waits();
}

void end_wait() {
  std::lock_guard<std::mutex> lock(waits_mutex);
  const long thread = current_thread();
  for (auto wait = waits.rbegin(); wait != waits.rend(); ++wait)
    if (wait->thread == thread) {
      waits.erase(std::next(wait).base());
      break;
    }
  publish_waits();
}

}  // namespace lockstep
