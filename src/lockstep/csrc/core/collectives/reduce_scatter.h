// Reduce-scatter: an exchange (exchange.h) in which each rank combines the blocks that it
// receives along the tree.
#pragma once

#include "../tree_reduce.h"
#include "exchange.h"

namespace lockstep {

// Combines the blocks for this rank into `result`, of `count` elements.
void reduce_scatter(CollectiveCall& call, const std::vector<Block>& send, char* result,
                    size_t count, DataType type, Reduction reduction);

}  // namespace lockstep
