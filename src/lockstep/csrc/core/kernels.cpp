#include "kernels.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace lockstep {

namespace plain {
Kernels make_kernels(const char* name);
}
#if defined(__x86_64__)
namespace avx2 {
Kernels make_kernels(const char* name);
}
namespace avx512 {
Kernels make_kernels(const char* name);
}
#endif

size_t element_size(DataType type) {
  static const size_t bytes[kDataTypes] = {8, 4, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1, 8, 16, 1};
  return bytes[static_cast<int>(type)];
}

const Kernels* find_kernels(const char* name) {
  if (std::strcmp(name, "plain") == 0) {
    static const Kernels table = plain::make_kernels("plain");
    return &table;
  }
#if defined(__x86_64__)
  // Checked at run time: the code may run on another machine than it was built on.
  if (std::strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2")) {
    static const Kernels table = avx2::make_kernels("avx2");
    return &table;
  }
  if (std::strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    static const Kernels table = avx512::make_kernels("avx512");
    return &table;
  }
#endif
  return nullptr;
}

static const Kernels& select_kernels() {
  const char* requested = std::getenv("LOCKSTEP_KERNELS");
  if (requested)
    if (const Kernels* found = find_kernels(requested)) return *found;
  for (const char* name : {"avx512", "avx2"})
    if (const Kernels* found = find_kernels(name)) return *found;
  return *find_kernels("plain");
}

const Kernels& kernels() {
  static const Kernels& chosen = select_kernels();
  return chosen;
}

}  // namespace lockstep
