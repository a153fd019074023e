// Runs all tests, or those whose name contains the argument.
#include <chrono>
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : Test::all()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    const auto begun = std::chrono::steady_clock::now();
    test.body();
    const auto took = std::chrono::steady_clock::now() - begun;
    std::printf("%-60s %6.2f s\n", test.name, std::chrono::duration<double>(took).count());
    std::fflush(stdout);
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran ? 0 : 1;
}
