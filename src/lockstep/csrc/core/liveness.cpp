#include "liveness.h"

#include <pthread.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace lockstep {

void copy_text(char* to, const std::string& text) {
  const size_t bytes = text.size() < kTextBytes - 1 ? text.size() : kTextBytes - 1;
  std::memcpy(to, text.data(), bytes);
  to[bytes] = 0;
}

std::string read_text(const char* from) { return std::string(from, strnlen(from, kTextBytes)); }

void init_liveness_lock(RankState& state) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  const int failed = pthread_mutex_init(&state.lock, &kind);
  pthread_mutexattr_destroy(&kind);
  if (failed != 0) throw CommError("this system has no robust mutexes");
}

Health check_health(RankState& state) {
  const Membership membership = state.membership.load(std::memory_order_acquire);
  if (membership == Membership::left) return Health::left;
  if (membership == Membership::absent) return Health::alive;
  const int result = pthread_mutex_trylock(&state.lock);
  if (result == EBUSY) return Health::alive;
  // Unlocking it without pthread_mutex_consistent makes a dead rank's mutex unusable for
  // good, so that every other rank sees ENOTRECOVERABLE.
  if (result == 0 || result == EOWNERDEAD) pthread_mutex_unlock(&state.lock);
  if (result == 0) return Health::left;
  return result == EOWNERDEAD || result == ENOTRECOVERABLE ? Health::dead : Health::alive;
}

LivenessThread::LivenessThread(RankState& state, std::function<std::string()> locate)
    : state_(state), locate_(std::move(locate)) {
  thread_ = std::thread([this] { run(); });
  while (!started_.load(std::memory_order_acquire)) yield_core();
}

LivenessThread::~LivenessThread() {
  stopping_.store(true);
  state_.location_requests.fetch_add(1);
  futex_wake_all(state_.location_requests);
  thread_.join();
}

void LivenessThread::publish_text(const std::string& text) {
  while (writing_.test_and_set(std::memory_order_acquire)) yield_core();
  copy_text(state_.text, text);
  writing_.clear(std::memory_order_release);
}

void LivenessThread::run() {
  pthread_setname_np(pthread_self(), "lockstep-live");
  pthread_mutex_lock(&state_.lock);
  state_.membership.store(Membership::joined, std::memory_order_release);
  started_.store(true, std::memory_order_release);
  uint32_t answered = state_.location_requests.load();
  while (true) {
    const uint32_t requests = state_.location_requests.load();
    if (stopping_.load()) break;
    if (requests == answered) {
      futex_sleep(state_.location_requests, requests, std::chrono::seconds(60));
      continue;
    }
    publish_text(locate_ ? locate_() : "");
    answered = requests;
    state_.location_answers.store(requests, std::memory_order_release);
  }
  state_.membership.store(Membership::left, std::memory_order_release);
  pthread_mutex_unlock(&state_.lock);
}

std::string request_location(RankState& state, std::chrono::milliseconds timeout) {
  const uint32_t request = state.location_requests.fetch_add(1) + 1;
  futex_wake_all(state.location_requests);
  const auto until = Clock::now() + timeout;
  while (Clock::now() < until) {
    if (reached(state.location_answers.load(std::memory_order_acquire), request))
      return read_text(state.text);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "";
}

}  // namespace lockstep
