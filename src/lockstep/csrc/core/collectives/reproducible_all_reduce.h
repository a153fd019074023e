// The reproducible all-reduce (or reduce-scatter) of a bucket of tensors, which
// are added along the tree of micro-batches.
//
// Rank r holds some nodes of the tree, each with a value of every member of the bucket. It
// packs them, one node after the other, into a buffer in a segment:
//
//     | node 0: member 0 . member 1 . | node 1: ... | flags of 0 | flags of 1 |
//
// Rank j adds slice j of all nodes of all ranks in tree order, rounding to the tensors' own
// dtype at every node, and writes it to slice j of every rank's result, or only of its own
// (`scatter`). A member that is absent in a node is left out of the sum there, so that -0.0
// stays -0.0. Two barriers; each node is read once, each result written once.
//
// A result may be a node of the same rank (the sum in place): between the two barriers only
// rank j reads or writes slice j of any rank's buffer, and the reduction has read a
// block of every node before it writes the sum of that block. The rest of the packed buffers,
// the flags and the other nodes, is only read.
//
//     slice      |  0  |    1    |  2  |
//     rank 0     | r0 w|    r1 w | r2 w|  node 0, and the result
//                | r0  |    r1   | r2  |  node 1
//     rank 1     | r0 w|    r1 w | r2 w|  node 2, and the result
//     rank 2     |    w|       w |    w|  no node: a separate result
#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "../call_queue.h"
#include "../collective_call.h"
#include "../tree_reduce.h"

namespace lockstep {

// Flags of a member in a node. A stale value (2) is added, but only if some rank has a new one.
constexpr uint8_t kAbsent = 0, kNew = 1;

struct Bucket {
  DataType type = DataType::f32;
  size_t length = 0;                                      // elements of one node
  std::vector<std::pair<size_t, size_t>> members;         // offset, elements
  std::vector<std::vector<std::pair<int, int>>> holders;  // nodes of each rank
  int leaves = 1;
  std::vector<size_t> cuts;  // slice j: elements [cuts[j], cuts[j + 1]); empty: even slices
  bool scatter = false;      // each rank gets only its own slice

  Slice slice(int ranks, int rank) const;
  // Returns a hash, never 0, of everything that must be equal on all ranks.
  uint64_t digest() const;
};

// Throws UsageError if the fields of the bucket contradict each other, or if the result
// overlaps the packed nodes without being one of them.
void check(const Bucket& bucket, int rank, const char* packed, const char* result);

// Adds a bucket. The packed buffers must be in segments, and so must the results unless
// scattered. `own` may point to the values of this rank's first node in private memory: no
// other rank reads this rank's own slice of its nodes, so that slice is read from `own` and
// need not be packed.
//
// Returns which members are new in any node; the result of the others is undefined. A
// scattered result is not changed outside the rank's slice.
std::vector<bool> reproducible_all_reduce(CollectiveCall& call, const Bucket& bucket, char* packed,
                                          char* result, const char* own = nullptr);

// The same in steps, between which the rank can compute instead of waiting for the others:
//
//     publish     this rank has packed its nodes
//     add         all ranks have: this rank adds its slice
//     complete    all ranks have added
//
// The next sum may be published before this one is complete: it is added only after all ranks
// have published it, and so have added this one.
class SteppedSum {
 public:
  SteppedSum(Group& group, const CallInfo& info, Bucket bucket, char* packed, char* result,
             const char* own, std::chrono::milliseconds timeout);

  // Takes the steps that need not wait.
  Progress advance();
  // Takes all steps that are left.
  void finish(bool is_background);
  // Returns which members are new, as `reproducible_all_reduce` does, once all steps are taken.
  const std::vector<bool>& is_new() const { return is_new_; }

 private:
  enum class State { created, published, added };
  void publish();
  void add();

  Group& group_;
  const CallInfo info_;
  const Bucket bucket_;
  char* const packed_;
  char* const result_;
  const char* const own_;
  const std::chrono::milliseconds timeout_;
  State state_ = State::created;
  std::optional<CollectiveCall> call_;  // since it was published
  uint32_t phase_ = 0;                  // that all ranks have to reach for the next step
  std::vector<bool> is_new_;
};

// Adds a small bucket whose nodes were sent with another message, without a call of its own. The
// message of each rank ends with what it packed and the bucket's digest:
//
//     | ... | node 0 | node 1 | flags of 0 | flags of 1 | digest |
//
// Writes the sums to `result`, and returns which members are new. Throws UsageError if a message
// ends with something else.
std::vector<bool> add_packed(const Bucket& bucket, const std::vector<std::string_view>& messages,
                             char* result);

// Returns the bytes that a rank packs.
size_t packed_bytes(const Bucket& bucket, int rank);

}  // namespace lockstep
