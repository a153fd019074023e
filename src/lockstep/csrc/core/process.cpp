#include "process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace lockstep {

static std::atomic<int> pid{getpid()};

[[maybe_unused]] static const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { pid.store(getpid(), std::memory_order_relaxed); });

int current_pid() { return pid.load(std::memory_order_relaxed); }

}  // namespace lockstep
