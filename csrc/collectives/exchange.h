// Exchange: every rank has a block for some others, and everybody gets its own.
//
// Broadcast, all-gather, gather, scatter, all-to-all (equal and unequal) and
// reduce-scatter are one pattern: blocks s -> d, which the reader d copies (or
// combines along the tree). Only what a rank publishes differs:
//
//     slot     | sends | receives | places | blocks ... |     it fits: one barrier
//     direct   the blocks lie in a segment; readers copy from there, then a barrier
//              before their owner may change them
//     staged   pieces through the stages, one barrier a round; the next piece is
//              copied in while slower readers still copy the last one out
//
//              same block for all    | piece of the whole stage      |
//              a block for each      | for 0 | for 2 | for 3 | ...   |   of rank 1
//
//              written with ordinary stores or past the caches (choice.h)
//
// Each rank chooses its own route. The tables of sizes are compared by everybody:
// s sends d what d expects, or all ranks throw. Cost for S bytes read by n ranks:
// direct nS read and nS written; staged as much again in the caches.
#pragma once

#include <vector>

#include "../fold.h"
#include "../group.h"

namespace lockstep {

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
};

struct Exchange {
  std::vector<Block> send;     // to each rank
  std::vector<Block> receive;  // from each rank; where combined, only the sizes count
  bool same = false;           // all blocks sent are the same one, or empty
};

void exchange(Turn& turn, const Exchange& blocks);

// The blocks that arrive are combined into `result`, of `count` elements.
void reduce_scatter(Turn& turn, const std::vector<Block>& send, char* result, size_t count,
                    Type type, Reduction reduction);

}  // namespace lockstep
