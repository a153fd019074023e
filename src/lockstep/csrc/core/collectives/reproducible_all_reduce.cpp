#include "reproducible_all_reduce.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include "../errors.h"

namespace lockstep {
namespace {

struct Node {
  std::pair<int, int> leaves;
  const char* values;
  const uint8_t* present;
};

// Returns all nodes of all ranks, whose packed nodes begin at `starts`.
std::vector<Node> collect_nodes(const Bucket& bucket, const std::vector<const char*>& starts) {
  std::vector<Node> nodes;
  const size_t bytes = bucket.length * element_size(bucket.type);
  for (size_t rank = 0; rank < starts.size(); ++rank) {
    const auto& held = bucket.holders[rank];
    for (size_t i = 0; i < held.size(); ++i)
      nodes.push_back({held[i], starts[rank] + i * bytes,
                       reinterpret_cast<const uint8_t*>(starts[rank] + held.size() * bytes) +
                           i * bucket.members.size()});
  }
  return nodes;
}

void add_slice(const std::vector<Node>& nodes, const Bucket& bucket,
               const std::vector<bool>& present, const std::vector<char*>& results, Slice slice) {
  std::vector<std::pair<int, int>> leaves;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  const size_t item = element_size(bucket.type);
  for (const Node& node : nodes) {
    leaves.push_back(node.leaves);
    inputs.push_back(node.values + slice.begin * item);
  }
  for (char* result : results) outputs.push_back(result + slice.begin * item);
  std::vector<int> steps = tree_steps(leaves, bucket.leaves, present);
  if (steps.empty()) return;
  ReductionSpec spec{bucket.type, Reduction::sum, true, 1, {}};
  TreeReducer(std::move(steps), std::move(spec)).run(inputs, outputs, slice.size());
}

// Adds a slice of all members. Returns which members are new.
std::vector<bool> add_members(const std::vector<Node>& nodes, const Bucket& bucket,
                              const std::vector<char*>& results, Slice range) {
  std::vector<bool> is_new(bucket.members.size(), false);
  bool all_present = true;
  for (size_t m = 0; m < is_new.size(); ++m)
    for (const Node& node : nodes) {
      if (node.present[m] == kNew) is_new[m] = true;
      if (node.present[m] == kAbsent) all_present = false;
    }
  if (all_present && range.size()) add_slice(nodes, bucket, {}, results, range);
  for (size_t m = 0; !all_present && m < is_new.size(); ++m) {
    if (!is_new[m]) continue;
    const auto [offset, elements] = bucket.members[m];
    const Slice slice{std::max(range.begin, offset), std::min(range.end, offset + elements)};
    if (slice.begin >= slice.end) continue;
    std::vector<bool> present;
    for (const Node& node : nodes) present.push_back(node.present[m] != kAbsent);
    add_slice(nodes, bucket, present, results, slice);
  }
  return is_new;
}

}  // namespace

Slice Bucket::slice(int ranks, int rank) const {
  if (cuts.empty()) return slice_of(length, ranks, rank, element_size(type));
  const auto j = static_cast<size_t>(rank);
  return {cuts[j], cuts[j + 1]};
}

uint64_t Bucket::digest() const {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over 64-bit words
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  mix(static_cast<uint64_t>(type)), mix(length), mix(static_cast<uint64_t>(leaves));
  mix(scatter);
  for (const auto& [offset, elements] : members) mix(offset), mix(elements);
  for (const auto& held : holders) {
    mix(held.size());
    for (const auto& [lo, hi] : held)
      mix(static_cast<uint64_t>(lo)), mix(static_cast<uint64_t>(hi));
  }
  for (size_t cut : cuts) mix(cut);
  return hash | 1;
}

void check(const Bucket& bucket, int rank, const char* packed, const char* result) {
  for (const auto& [offset, elements] : bucket.members)
    if (offset > bucket.length || elements > bucket.length - offset)
      throw UsageError("reproducible_all_reduce: a member ends outside its bucket");
  const auto& cuts = bucket.cuts;
  if (!cuts.empty() && (cuts.size() != bucket.holders.size() + 1 || cuts.front() != 0 ||
                        cuts.back() != bucket.length || !std::is_sorted(cuts.begin(), cuts.end())))
    throw UsageError("reproducible_all_reduce: cuts must ascend from 0 to the bucket's " +
                     std::to_string(bucket.length) +
                     " elements and have one entry more than there are ranks");
  const size_t row = bucket.length * element_size(bucket.type);
  const std::less<const char*> before;
  const size_t values = bucket.holders[static_cast<size_t>(rank)].size() * row;
  if (!before(result, packed + packed_bytes(bucket, rank)) || !before(packed, result + row)) return;
  const bool is_inside = !before(result, packed) && before(result, packed + values);
  if (!is_inside || static_cast<size_t>(result - packed) % row != 0)
    throw UsageError(
        "reproducible_all_reduce: the result overlaps the packed nodes and is not one of them");
}

size_t packed_bytes(const Bucket& bucket, int rank) {
  const size_t nodes = bucket.holders[static_cast<size_t>(rank)].size();
  return nodes * (bucket.length * element_size(bucket.type) + bucket.members.size());
}

// Tells the other ranks where this rank's buffers are, when the call arrives.
static void set_buffers(CollectiveCall& call, const Bucket& bucket, const char* packed,
                        const char* result) {
  CallInfo& info = call.own_info();
  info.buffer = Heap::instance().find(packed, packed_bytes(bucket, call.rank()));
  info.result = Heap::instance().find(result, bucket.length * element_size(bucket.type));
  if (!info.buffer.is_shared() || !(bucket.scatter || info.result.is_shared()))
    throw UsageError("reproducible_all_reduce: the buffers must be in shared memory");
}

// Adds this rank's slice, after all ranks have arrived. Returns which members are new.
static std::vector<bool> add_own_slice(CollectiveCall& call, const Bucket& bucket, char* packed,
                                       char* result, const char* own) {
  std::vector<const char*> starts;
  std::vector<char*> results{result};  // this rank's own first: it stays in this core's cache
  for (int rank = 0; rank < call.size(); ++rank) {
    if (rank == call.rank()) {
      starts.push_back(packed);
      continue;
    }
    starts.push_back(call.map(rank, call.info(rank).buffer, packed_bytes(bucket, rank)));
    if (!bucket.scatter)
      results.push_back(
          call.map(rank, call.info(rank).result, bucket.length * element_size(bucket.type)));
  }
  std::vector<Node> nodes = collect_nodes(bucket, starts);
  if (own)
    for (Node& node : nodes)
      if (node.values == packed) node.values = own;  // this rank's first node
  return add_members(nodes, bucket, results, bucket.slice(call.size(), call.rank()));
}

std::vector<bool> add_packed(const Bucket& bucket, const std::vector<std::string_view>& messages,
                             char* result) {
  struct alignas(kCacheLine) Line {
    char bytes[kCacheLine];
  };
  const size_t ranks = bucket.holders.size();
  size_t total = 0;
  for (size_t rank = 0; rank < ranks; ++rank)
    total += round_to_lines(packed_bytes(bucket, static_cast<int>(rank)));
  // The nodes may begin anywhere in a message, and numbers must not.
  const std::unique_ptr<Line[]> aligned(new Line[total / kCacheLine]);
  char* next = reinterpret_cast<char*>(aligned.get());
  const uint64_t expected = bucket.digest();
  std::vector<const char*> starts;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t bytes = packed_bytes(bucket, static_cast<int>(rank));
    const std::string_view message = rank < messages.size() ? messages[rank] : "";
    uint64_t digest = 0;
    if (message.size() >= bytes + sizeof digest)
      std::memcpy(&digest, message.data() + message.size() - sizeof digest, sizeof digest);
    if (digest != expected)
      throw UsageError("add_packed: the message of rank " + std::to_string(rank) +
                       " does not end with its nodes of this bucket");
    std::memcpy(next, message.data() + message.size() - sizeof digest - bytes, bytes);
    starts.push_back(next);
    next += round_to_lines(bytes);
  }
  return add_members(collect_nodes(bucket, starts), bucket, {result}, {0, bucket.length});
}

std::vector<bool> reproducible_all_reduce(CollectiveCall& call, const Bucket& bucket, char* packed,
                                          char* result, const char* own) {
  set_buffers(call, bucket, packed, result);
  call.arrive();
  std::vector<bool> is_new = add_own_slice(call, bucket, packed, result, own);
  call.sync();
  return is_new;
}

SteppedSum::SteppedSum(Group& group, const CallInfo& info, Bucket bucket, char* packed,
                       char* result, const char* own, std::chrono::milliseconds timeout)
    : group_(group),
      info_(info),
      bucket_(std::move(bucket)),
      packed_(packed),
      result_(result),
      own_(own),
      timeout_(timeout) {}

void SteppedSum::publish() {
  call_.emplace(group_, info_, timeout_, false);
  set_buffers(*call_, bucket_, packed_, result_);
  phase_ = call_->advance();
  state_ = State::published;
}

void SteppedSum::add() {
  call_->compare();
  is_new_ = add_own_slice(*call_, bucket_, packed_, result_, own_);
  phase_ = call_->advance();
  state_ = State::added;
}

Progress SteppedSum::advance() {
  if (state_ == State::created) publish();
  if (state_ == State::published && call_->has_reached(phase_)) add();
  if (state_ == State::published) return Progress::waiting;
  return call_->has_reached(phase_) ? Progress::executed : Progress::passed;
}

void SteppedSum::finish(bool is_background) {
  if (state_ == State::created) publish();
  call_->begin_waiting(is_background);
  if (state_ == State::published) {
    call_->wait_phase(phase_);
    add();
  }
  call_->wait_phase(phase_);
}

}  // namespace lockstep
