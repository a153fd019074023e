// Share: creates a segment that every rank of the group maps.
//
//     rank 0    create, reserve and prefault a memfd; write its handle to my slot
//        ---- arrive ----          the sizes are compared as in any call
//     others    attach (same user, size, nonce); write an error, if any, to my slot
//        ---- sync ----
//     all       read all slots: either every rank throws, or none
//     rank 0    close the descriptor: nobody else can attach
//
// The kernel frees the memory when the last process has unmapped it or has ended.
#pragma once

#include <memory>

#include "../collective_call.h"

namespace lockstep {

constexpr uint64_t kSharedStart = 4096;  // the segment's header has the first page

// Returns a segment with `bytes` from kSharedStart on. Throws CallError on every rank if one
// has not enough memory or cannot attach; the group stays usable.
std::unique_ptr<Segment> share(CollectiveCall& call, uint64_t bytes);

}  // namespace lockstep
