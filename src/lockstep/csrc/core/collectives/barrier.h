// Barrier: every rank advances its own phase and waits for the phases of all other ranks.
// Cost: one cache line written and n - 1 read by each rank.
#pragma once

#include "../collective_call.h"

namespace lockstep {

inline void barrier(CollectiveCall& call) { call.arrive(); }

}  // namespace lockstep
