// A minimal test framework: a test is a function, and CHECK reports where it failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "group.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

struct Test {
  const char* name;
  void (*body)();
  static std::vector<Test>& all() {
    static std::vector<Test> tests;
    return tests;
  }
  Test(const char* n, void (*b)()) : name(n), body(b) { all().push_back(*this); }
};

#define TEST(name)                          \
  static void name();                       \
  static Test register_##name(#name, name); \
  static void name()

#if defined(__SANITIZE_THREAD__) || defined(WITHOUT_FORK)
constexpr bool kMayFork = false;  // ThreadSanitizer's threads do not survive a fork
#else
constexpr bool kMayFork = true;
#endif

constexpr std::chrono::milliseconds kTestTimeout{60000};
constexpr uint64_t kMiB = uint64_t{1} << 20;

// Runs `body(group)` in a thread for each of `n` ranks. They share one mapping, so
// that a sanitizer sees the same addresses from all of them.
inline void on_ranks(int n, const std::function<void(lockstep::Group&)>& body) {
  std::vector<std::unique_ptr<lockstep::Group>> groups;
  groups.push_back(lockstep::Group::create(n, {}));
  auto segment = groups[0]->segment();
  for (int rank = 1; rank < n; ++rank)
    groups.push_back(lockstep::Group::attach(rank, n, segment, {}));
  std::vector<std::thread> threads;
  for (auto& group : groups) threads.emplace_back([&] { body(*group); });
  for (auto& thread : threads) thread.join();
}

// Returns the message of the exception that `body` throws, or "".
template <typename F>
std::string error_of(F body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
