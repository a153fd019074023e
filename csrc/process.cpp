#include "process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace lockstep {

static std::atomic<int> id{getpid()};

[[maybe_unused]] static const int at_fork =
    pthread_atfork(nullptr, nullptr, [] { id.store(getpid(), std::memory_order_relaxed); });

int this_process() { return id.load(std::memory_order_relaxed); }

}  // namespace lockstep
