// The exact sum: a bucket of tensors added along the tree of micro-batches.
//
// Rank r holds some nodes of the tree for every member of the bucket. It packs
// them, one after the other, into a buffer in a segment:
//
//     | node 0: member 0 . member 1 . | node 1: ... | present 0 | present 1 |
//
// Rank j adds slice j of all nodes of all ranks in tree order, rounding to the
// tensors' own type at every node, and writes it into slice j of everybody's
// result, or only of its own (`scatter`). A member that is absent in a node is left
// out of the sum there, so that -0.0 stays -0.0. Two barriers; each node is read
// once, each result written once.
//
// A result may be a node of the same rank (the sum *in place*): between the two
// barriers rank j alone reads or writes slice j of anything, whoever owns it, and
// the fold has read a block of every node before it writes that block's sum. What
// else lies in the packed buffers, the flags and the other nodes, is only read.
//
//     slice      |  0  |    1    |  2  |
//     rank 0     | r0 w|    r1 w | r2 w|  node 0, and its result
//                | r0  |    r1   | r2  |  node 1
//     rank 1     | r0 w|    r1 w | r2 w|  node 2, and its result
//     rank 2     |    w|       w |    w|  no node: a result of its own
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
  std::vector<size_t> cuts;  // slice j: elements [cuts[j], cuts[j + 1]); empty: even slices
  bool scatter = false;      // a rank gets its own slice only

  Slice slice(int ranks, int rank) const;
  // All that the ranks must have alike, as one number that is not 0.
  uint64_t digest() const;
};

// Throws Misuse where the numbers of a bucket contradict each other, or where a
// result overlaps the packed nodes without being one of them.
void check(const ExactBucket& bucket, int rank, const char* packed, const char* result);

// Packed buffers lie in segments, and so do the results unless scattered. Returns
// which members are new in any node; the result has the others only by chance. A
// scattered result is unchanged outside the rank's slice. Nobody else reads a rank's
// own slice of what it packs: with `own`, the values of its first node anywhere in its
// memory, that slice is read there and need not be packed.
std::vector<bool> exact_sum(Turn& turn, const ExactBucket& bucket, char* packed, char* result,
                            const char* own = nullptr);

// Bytes that rank `rank` packs.
size_t packed_bytes(const ExactBucket& bucket, int rank);

}  // namespace lockstep
