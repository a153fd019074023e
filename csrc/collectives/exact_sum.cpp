#include "exact_sum.h"

#include <algorithm>

#include "../failure.h"

namespace lockstep {
namespace {

struct Node {
  std::pair<int, int> leaves;
  const char* values;
  const uint8_t* present;
};

// All nodes of all ranks, wherever they lie.
std::vector<Node> nodes_of(Turn& turn, const ExactBucket& bucket, char* packed) {
  std::vector<Node> nodes;
  const size_t bytes = bucket.length * bytes_of(bucket.type);
  for (int rank = 0; rank < turn.size(); ++rank) {
    const auto& held = bucket.holders[static_cast<size_t>(rank)];
    const char* start = rank == turn.rank()
                            ? packed
                            : turn.group().neighbours().at(turn.call(rank).place,
                                                           packed_bytes(bucket, rank));
    for (size_t i = 0; i < held.size(); ++i)
      nodes.push_back({held[i], start + i * bytes,
                       reinterpret_cast<const uint8_t*>(start + held.size() * bytes) +
                           i * bucket.members.size()});
  }
  return nodes;
}

void add(const std::vector<Node>& nodes, const ExactBucket& bucket,
         const std::vector<bool>& present, const std::vector<char*>& results, Slice slice) {
  std::vector<std::pair<int, int>> leaves;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  const size_t item = bytes_of(bucket.type);
  for (const Node& node : nodes) {
    leaves.push_back(node.leaves);
    inputs.push_back(node.values + slice.begin * item);
  }
  for (char* result : results) outputs.push_back(result + slice.begin * item);
  std::vector<int> steps = tree_steps(leaves, bucket.leaves, present);
  if (steps.empty()) return;
  Arithmetic arithmetic{bucket.type, Reduction::sum, true, bucket.divisor, {}};
  Fold(std::move(steps), std::move(arithmetic)).run(inputs, outputs, slice.size());
}

}  // namespace

size_t packed_bytes(const ExactBucket& bucket, int rank) {
  const size_t nodes = bucket.holders[static_cast<size_t>(rank)].size();
  return nodes * (bucket.length * bytes_of(bucket.type) + bucket.members.size());
}

std::vector<bool> exact_sum(Turn& turn, const ExactBucket& bucket, char* packed, char* result) {
  const size_t item = bytes_of(bucket.type);
  turn.mine().place = Heap::here().find(packed, packed_bytes(bucket, turn.rank()));
  turn.mine().second = Heap::here().find(result, bucket.length * item);
  if (!turn.mine().place.shared() || !turn.mine().second.shared())
    throw Misuse("the buffers of an exact sum must lie in shared memory");
  turn.arrive();
  const std::vector<Node> nodes = nodes_of(turn, bucket, packed);
  std::vector<char*> results;
  for (int rank = 0; rank < turn.size(); ++rank)
    results.push_back(rank == turn.rank()
                          ? result
                          : turn.group().neighbours().at(turn.call(rank).second,
                                                         bucket.length * item));
  const Slice mine = slice_of(bucket.length, turn.size(), turn.rank(), item);
  std::vector<bool> any(bucket.members.size(), false);
  bool all = true;
  for (size_t m = 0; m < any.size(); ++m)
    for (const Node& node : nodes) {
      if (node.present[m] == kNew) any[m] = true;
      if (node.present[m] == kAbsent) all = false;
    }
  if (all && mine.size()) add(nodes, bucket, {}, results, mine);
  for (size_t m = 0; !all && m < any.size(); ++m) {
    if (!any[m]) continue;
    const auto [offset, elements] = bucket.members[m];
    const Slice slice{std::max(mine.begin, offset), std::min(mine.end, offset + elements)};
    if (slice.begin >= slice.end) continue;
    std::vector<bool> present;
    for (const Node& node : nodes) present.push_back(node.present[m] != kAbsent);
    add(nodes, bucket, present, results, slice);
  }
  turn.sync();
  return any;
}

}  // namespace lockstep
