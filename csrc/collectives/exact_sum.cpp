#include "exact_sum.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "../failure.h"

namespace lockstep {
namespace {

struct Node {
  std::pair<int, int> leaves;
  const char* values;
  const uint8_t* present;
};

// All nodes of all ranks, wherever they lie.
std::vector<Node> nodes_of(Turn& turn, const ExactBucket& bucket, char* packed, const char* own) {
  std::vector<Node> nodes;
  const size_t bytes = bucket.length * bytes_of(bucket.type);
  for (int rank = 0; rank < turn.size(); ++rank) {
    const auto& held = bucket.holders[static_cast<size_t>(rank)];
    const char* start = rank == turn.rank()
                            ? packed
                            : turn.group().neighbours().at(turn.call(rank).place,
                                                           packed_bytes(bucket, rank));
    for (size_t i = 0; i < held.size(); ++i)
      nodes.push_back({held[i], own && rank == turn.rank() && i == 0 ? own : start + i * bytes,
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

Slice ExactBucket::slice(int ranks, int rank) const {
  if (cuts.empty()) return slice_of(length, ranks, rank, bytes_of(type));
  const auto j = static_cast<size_t>(rank);
  return {cuts[j], cuts[j + 1]};
}

uint64_t ExactBucket::digest() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over whole numbers
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  mix(static_cast<uint64_t>(leaves));
  mix(scatter);
  uint64_t bits;
  std::memcpy(&bits, &divisor, sizeof bits);
  mix(bits);
  for (const auto& [offset, elements] : members) mix(offset), mix(elements);
  for (const auto& held : holders) {
    mix(held.size());
    for (const auto& [lo, hi] : held) mix(static_cast<uint64_t>(lo)), mix(static_cast<uint64_t>(hi));
  }
  for (size_t cut : cuts) mix(cut);
  return hash | 1;
}

void check(const ExactBucket& bucket, int rank, const char* packed, const char* result) {
  for (const auto& [offset, elements] : bucket.members)
    if (offset > bucket.length || elements > bucket.length - offset)
      throw Misuse("exact_sum: a member ends outside its bucket");
  const auto& cuts = bucket.cuts;
  if (!cuts.empty() && (cuts.size() != bucket.holders.size() + 1 || cuts.front() != 0 ||
                        cuts.back() != bucket.length || !std::is_sorted(cuts.begin(), cuts.end())))
    throw Misuse("exact_sum: the cuts must ascend from 0 to the bucket's " +
                 std::to_string(bucket.length) + " elements, one more than there are ranks");
  const size_t row = bucket.length * bytes_of(bucket.type);
  const std::less<const char*> before;
  const size_t values = bucket.holders[static_cast<size_t>(rank)].size() * row;
  if (!before(result, packed + packed_bytes(bucket, rank)) || !before(packed, result + row)) return;
  const bool inside = !before(result, packed) && before(result, packed + values);
  if (!inside || static_cast<size_t>(result - packed) % row != 0)
    throw Misuse("exact_sum: the result overlaps the packed nodes and is not one of them");
}

size_t packed_bytes(const ExactBucket& bucket, int rank) {
  const size_t nodes = bucket.holders[static_cast<size_t>(rank)].size();
  return nodes * (bucket.length * bytes_of(bucket.type) + bucket.members.size());
}

std::vector<bool> exact_sum(Turn& turn, const ExactBucket& bucket, char* packed, char* result,
                            const char* own) {
  const size_t item = bytes_of(bucket.type);
  turn.mine().place = Heap::here().find(packed, packed_bytes(bucket, turn.rank()));
  turn.mine().second = Heap::here().find(result, bucket.length * item);
  if (!turn.mine().place.shared() || !(bucket.scatter || turn.mine().second.shared()))
    throw Misuse("the buffers of an exact sum must lie in shared memory");
  turn.arrive();
  const std::vector<Node> nodes = nodes_of(turn, bucket, packed, own);
  std::vector<char*> results{result};  // my own first: it stays in this core's cache
  for (int rank = 0; rank < turn.size() && !bucket.scatter; ++rank)
    if (rank != turn.rank())
      results.push_back(turn.group().neighbours().at(turn.call(rank).second,
                                                     bucket.length * item));
  const Slice mine = bucket.slice(turn.size(), turn.rank());
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
