// The exact sum: a bucket of tensors added along the tree of micro-batches.
//
// Rank r holds some nodes of the tree for every member of the bucket. It packs
// them, one after the other, into a buffer in a segment:
//
//     | node 0: member 0 . member 1 . | node 1: ... | present 0 | present 1 |
//
// Rank j adds slice j of all nodes of all ranks in tree order, rounding to the
// tensors' own type at every node, and writes it into slice j of everybody's
// result. A member that is absent in a node is left out of the sum there, so that
// -0.0 stays -0.0. Two barriers; each node is read once, each result written once.
#pragma once

#include <utility>
#include <vector>

#include "../fold.h"
#include "../group.h"

namespace lockstep {

// What a flag says. A stale value counts, but only where somebody has a new one.
constexpr uint8_t kAbsent = 0, kNew = 1;  // 2: stale

struct ExactBucket {
  Type type = Type::f32;
  size_t length = 0;                                    // elements of one node
  std::vector<std::pair<size_t, size_t>> members;       // offset, elements
  std::vector<std::vector<std::pair<int, int>>> holders;  // nodes of each rank
  int leaves = 1;
  double divisor = 1;
};

// Both buffers lie in segments. Returns which members are new in any node;
// the result has the others only by chance.
std::vector<bool> exact_sum(Turn& turn, const ExactBucket& bucket, char* packed, char* result);

// Bytes that rank `rank` packs.
size_t packed_bytes(const ExactBucket& bucket, int rank);

}  // namespace lockstep
