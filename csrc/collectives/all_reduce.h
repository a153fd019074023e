// All-reduce and reduce: one tensor of each rank, combined along the tree.
//
//     small    everybody writes its slot, waits for all, and combines all slots.
//              One barrier; every rank does all the additions.
//
//     direct   all tensors lie in segments. Rank j reads slice j of all tensors
//              and writes the sum into slice j of all: each byte crosses the
//              memory bus twice, the lower bound. Two barriers.
//
//     staged   tensors in private memory, in pieces that stay in the caches:
//
//              rank 0   | own . . | slice 1 |     (1) copy the others' slices of
//              rank 1   | slice 0 | own . . |         the piece into my stage
//                  ---- barrier A ----            (2) combine my slice, from the
//              rank 0   | SUM 0 . |                   stages and my own memory,
//              rank 1             | SUM 1 . |         into my stage and my memory
//                  ---- barrier B ----            (3) copy the others' sums out
//
//              Piece k+1 is copied in before barrier B of piece k. A stage is used
//              again three pieces later, when everybody has passed B of the piece
//              between and so has left it. Cost: two passes over private memory;
//              the rest is cache traffic. Where the cores share a cache ordinary
//              stores into the stages are twice as fast, elsewhere several times
//              slower than stores past the caches: choice.h tells which.
#pragma once

#include "../fold.h"
#include "../group.h"

namespace lockstep {

// `root` -1: everybody gets the result in `data`; else only that rank, and the
// others' tensors are only read.
void all_reduce(Turn& turn, void* data, size_t count, Type type, Reduction reduction,
                int root = -1);

}  // namespace lockstep
