// Barrier: one flag a rank; everybody raises its own and waits for the others'.
// Cost: one cache line written and n - 1 read by each rank.
#pragma once

#include "../group.h"

namespace lockstep {

inline void barrier(Turn& turn) { turn.arrive(); }

}  // namespace lockstep
