// A group of ranks, as one of its ranks holds it. Its collective calls are in
// collective_call.h, its messages in point_to_point.h.
#pragma once

#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "auto_tuner.h"
#include "heap.h"
#include "layout.h"
#include "liveness.h"
#include "peer_mappings.h"
#include "segment.h"

namespace lockstep {

// How a group names itself in messages, and hooks into the program around it.
struct GroupInfo {
  std::string name = "default";
  std::vector<int> global_ranks;  // in the group's order; empty: 0, 1, ...
  std::function<std::string(int dtype)> dtype_name;
  std::function<uint64_t(int dtype)> dtype_bytes;  // of an element
  std::function<std::string()> locate;             // where this rank is in its own code
  std::function<void()> poll_signals;              // throws what a signal handler raised
};

const char* op_name(Op op);
const char* reduction_name(int reduction);
std::string format_seconds(std::chrono::milliseconds time);

class Group {
 public:
  // Rank 0 creates the segment, the other ranks attach it. Ranks that are threads of one
  // process may share one Segment.
  static std::unique_ptr<Group> create(int size, GroupInfo info);
  static std::unique_ptr<Group> attach(int rank, int size, const SegmentHandle& handle,
                                       GroupInfo info);
  static std::unique_ptr<Group> attach(int rank, int size, std::shared_ptr<Segment> segment,
                                       GroupInfo info);
  ~Group();
  // Marks this rank as left. The memory stays mapped until destruction.
  void leave();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const GroupInfo& info() const { return info_; }
  void set_name(std::string name) { info_.name = std::move(name); }
  const Layout& layout() const { return layout_; }
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  GroupHeader& header() { return *header_; }
  RankState& rank_state(int rank) {
    return *reinterpret_cast<RankState*>(at(layout_.rank_state(rank)));
  }
  char* at(uint64_t offset) { return segment_->data() + offset; }
  PeerMappings& peer_mappings() { return peer_mappings_; }

  // Set by PointToPoint: called repeatedly while this rank waits in a collective, and when
  // it falls asleep there (true) and wakes up (false).
  std::function<void()> make_progress;
  std::function<void(bool)> on_sleep;

  // Selects ordinary stores (1) or stores that bypass the caches (0) into staging buffers,
  // per operation and power of two of its bytes. Ranks may differ: the result does not
  // depend on it.
  AutoTuner& store_tuner(Op op, uint64_t bytes) {
    return store_tuners_[{op, std::bit_width(bytes)}];
  }

  // Whether there are more ranks than cores that they may run on in all. The masks of all
  // ranks count: a rank that is bound to one core sees only that one. Re-evaluated every few
  // calls, because ranks may be bound to cores at any time.
  bool is_oversubscribed();

  // Whether buffers of so many bytes, of all ranks together, fill the last-level cache. A result
  // does not stay there then, and non-temporal stores save reading the lines that it replaces.
  bool fills_cache(uint64_t bytes) const { return bytes >= cache_bytes_; }

  std::vector<int> missing_ranks();  // that have not attached yet
  bool is_aborted() { return header_->aborted.load(std::memory_order_acquire) != 0; }
  // Aborts the group for all ranks. The first failure wins; returns the one that won.
  Failure abort(const Failure& failure);
  Failure failure();  // why it was aborted
  // Lets Python handle signals, which a wait would otherwise delay. If a handler raises
  // (Ctrl-C), aborts the group and throws that.
  void poll_signals();
  void abort_if_rank_died();

  int global_rank(int rank) const;
  std::string format_rank(int rank) const;                        // "rank 3"
  std::string format_ranks(const std::vector<int>& ranks) const;  // "ranks 0, 2"
  std::string describe(const CallInfo& info) const;  // "all_reduce(SUM, float32, 4 elements)"
  // What a thread of this rank sleeps in ("barrier #3"), for ranks that ask.
  void begin_sleep(const std::string& what);
  void end_sleep(const std::string& what);
  // Says what `rank` called last and where it is now, for a rank that waits for it.
  std::string describe_peer(int rank);

 private:
  friend class CollectiveCall;
  Group(int rank, int size, std::shared_ptr<Segment> segment, GroupInfo info);
  void publish_core_mask();
  std::string describe_location();  // where this rank is, and what it waits in

  int rank_, size_;
  std::shared_ptr<Segment> segment_;
  GroupHeader* header_;
  Layout layout_;
  uint64_t cache_bytes_;  // of the last-level cache
  GroupInfo info_;
  PeerMappings peer_mappings_;
  std::mutex sleep_mutex_;
  std::multiset<std::string> sleeping_in_;
  std::unique_ptr<LivenessThread> liveness_thread_;
  uint32_t phase_ = 0;  // phases passed, in all calls
  uint32_t calls_ = 0;  // collective calls begun
  uint32_t round_ = 0;  // the staging buffer to use next, 0 to 2
  std::atomic<uint32_t> affinity_polls_{0};
  std::atomic<bool> oversubscribed_{false};
  std::map<std::pair<Op, int>, AutoTuner> store_tuners_;
  Nonce probe_;  // in private memory: a rank that can read it can read this process's tensors
};

}  // namespace lockstep
