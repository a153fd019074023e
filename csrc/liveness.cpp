#include "liveness.h"

#include <pthread.h>

#include <cerrno>
#include <cstring>

#include "failure.h"

namespace lockstep {

void copy_text(char* to, const std::string& text) {
  const size_t bytes = text.size() < kText - 1 ? text.size() : kText - 1;
  std::memcpy(to, text.data(), bytes);
  to[bytes] = 0;
}

std::string read_text(const char* from) { return std::string(from, strnlen(from, kText)); }

void prepare_lock(Record& record) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  const int failed = pthread_mutex_init(&record.lock, &kind);
  pthread_mutexattr_destroy(&kind);
  if (failed != 0) throw Failure("this system has no robust mutexes");
}

Health health(Record& record) {
  const State state = record.state.load(std::memory_order_acquire);
  if (state == State::left) return Health::left;
  if (state == State::absent) return Health::fine;
  const int result = pthread_mutex_trylock(&record.lock);
  if (result == EBUSY) return Health::fine;
  // Unlocked as it is, a dead rank's mutex is unusable from now on, for everybody.
  if (result == 0 || result == EOWNERDEAD) pthread_mutex_unlock(&record.lock);
  if (result == 0) return Health::left;
  return result == EOWNERDEAD || result == ENOTRECOVERABLE ? Health::dead : Health::fine;
}

Keeper::Keeper(Record& record, std::function<std::string()> where)
    : record_(record), where_(std::move(where)) {
  thread_ = std::thread([this] { run(); });
  while (!started_.load(std::memory_order_acquire)) yield_core();
}

Keeper::~Keeper() {
  stopping_.store(true);
  record_.asked.fetch_add(1);
  futex_wake_all(record_.asked);
  thread_.join();
}

void Keeper::say(const std::string& text) {
  while (writing_.test_and_set(std::memory_order_acquire)) yield_core();
  copy_text(record_.site, text);
  writing_.clear(std::memory_order_release);
}

void Keeper::run() {
  pthread_setname_np(pthread_self(), "lockstep-keeper");
  pthread_mutex_lock(&record_.lock);
  record_.state.store(State::here, std::memory_order_release);
  started_.store(true, std::memory_order_release);
  uint32_t answered = record_.asked.load();
  while (true) {
    const uint32_t asked = record_.asked.load();
    if (stopping_.load()) break;
    if (asked == answered) {
      futex_sleep(record_.asked, asked, std::chrono::seconds(60));
      continue;
    }
    say(where_ ? where_() : "");
    answered = asked;
    record_.answered.store(asked, std::memory_order_release);
  }
  record_.state.store(State::left, std::memory_order_release);
  pthread_mutex_unlock(&record_.lock);
}

std::string ask(Record& record, std::chrono::milliseconds patience) {
  const uint32_t question = record.asked.fetch_add(1) + 1;
  futex_wake_all(record.asked);
  const auto until = Clock::now() + patience;
  while (Clock::now() < until) {
    if (reached(record.answered.load(std::memory_order_acquire), question))
      return read_text(record.site);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "";
}

}  // namespace lockstep
