#include "reduce.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace lockstep {

namespace plain {
Kernels table(const char* name);
}
#if defined(__x86_64__)
namespace avx2 {
Kernels table(const char* name);
}
namespace avx512 {
Kernels table(const char* name);
}
#endif

size_t bytes_of(Type type) {
  static const size_t bytes[kTypes] = {8, 4, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1};
  return bytes[static_cast<int>(type)];
}

const Kernels* kernels_named(const char* name) {
  if (std::strcmp(name, "plain") == 0) {
    static const Kernels table = plain::table("plain");
    return &table;
  }
#if defined(__x86_64__)
  // Asked at run time: the machine that built this may not be the one that runs it.
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2")) {
    static const Kernels table = avx2::table("avx2");
    return &table;
  }
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    static const Kernels table = avx512::table("avx512");
    return &table;
  }
#endif
  return nullptr;
}

static const Kernels& best() {
  const char* asked = std::getenv("LOCKSTEP_KERNELS");
  if (asked)
    if (const Kernels* found = kernels_named(asked)) return *found;
  for (const char* name : {"avx512", "avx2"})
    if (const Kernels* found = kernels_named(name)) return *found;
  return *kernels_named("plain");
}

const Kernels& kernels() {
  static const Kernels& chosen = best();
  return chosen;
}

}  // namespace lockstep
