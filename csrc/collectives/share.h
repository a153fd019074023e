// Share: memory of its own that every rank of the group maps.
//
//     rank 0    create, reserve and prefault a memfd; its address into my slot
//        ---- arrive ----          the sizes are compared as in any call
//     others    attach (same user, size, nonce); what went wrong into my slot
//        ---- sync ----
//     all       read all slots: every rank throws, or none
//     rank 0    close the descriptor: nobody else can attach
//
// The kernel frees the memory when the last process has unmapped it or has ended.
#pragma once

#include <memory>

#include "../group.h"

namespace lockstep {

constexpr uint64_t kSharedStart = 4096;  // the seal has the first page

// `bytes` from kSharedStart of the segment. Throws Refusal on every rank where one has
// not enough memory or can't attach; the group can go on.
std::unique_ptr<Segment> share(Turn& turn, uint64_t bytes);

}  // namespace lockstep
