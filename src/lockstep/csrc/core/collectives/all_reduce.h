// All-reduce and reduce: one tensor per rank, combined along the tree.
//
//     small    every rank writes its slot, waits for all ranks, and combines all slots.
//              One barrier; every rank does all the additions.
//
//     direct   all tensors are in segments. Rank j reads slice j of all tensors and writes
//              the sum to slice j of all: each byte crosses the memory bus twice, the
//              lower bound. Two barriers.
//
//     staged   tensors in private memory, in pieces that stay in the caches:
//
//              rank 0   | own . . | slice 1 |     (1) copy the other ranks' slices of the
//              rank 1   | slice 0 | own . . |         piece to my staging buffer
//                  ---- barrier A ----            (2) combine my slice, from the staging
//              rank 0   | SUM 0 . |                   buffers and my own memory, into my
//              rank 1             | SUM 1 . |         staging buffer and my own memory
//                  ---- barrier B ----            (3) copy the other ranks' sums out
//
//              Piece k+1 is copied in before barrier B of piece k. A staging buffer is
//              reused three pieces later, when every rank has passed B of the piece in
//              between and has finished reading it. Cost: two passes over private memory;
//              the rest is cache traffic. If the cores share a cache, ordinary stores to
//              the staging buffers are twice as fast as stores that bypass the caches;
//              otherwise they are several times slower. The auto-tuner chooses.
#pragma once

#include "../collective_call.h"
#include "../tree_reduce.h"

namespace lockstep {

// Writes the result to `data` of rank `root`, or of every rank if `root` is -1. The tensors
// of other ranks are only read.
void all_reduce(CollectiveCall& call, void* data, size_t count, DataType type, Reduction reduction,
                int root = -1);

// The tree over all ranks, with the divisor or factors of the reduction.
TreeReducer make_rank_reducer(CollectiveCall& call, DataType type, Reduction reduction);

}  // namespace lockstep
