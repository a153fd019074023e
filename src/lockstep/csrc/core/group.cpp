#include "group.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "channel.h"
#include "errors.h"

namespace lockstep {

constexpr uint32_t kAffinityPeriod = 64;  // calls between two reads of the core masks

std::unique_ptr<Group> Group::create(int size, GroupInfo info) {
  if (size < 1 || size > kMaxRanks)
    throw UsageError("group " + info.name + " has " + std::to_string(size) +
                     " ranks; the backend lockstep supports 1 to " + std::to_string(kMaxRanks));
  const Layout layout = Layout::choose(size);
  auto segment =
      std::make_shared<Segment>(Segment::create("lockstep-group", layout.total(), layout.total()));
  auto* header = reinterpret_cast<GroupHeader*>(segment->data());
  const SegmentHeader prefix = header->segment;
  new (header) GroupHeader;
  header->segment = prefix;
  layout.write(*header);
  for (int rank = 0; rank < size; ++rank)
    init_liveness_lock(*new (segment->data() + layout.rank_state(rank)) RankState);
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) new (segment->data() + layout.channel(from, to)) Channel;
  return std::unique_ptr<Group>(new Group(0, size, std::move(segment), std::move(info)));
}

std::unique_ptr<Group> Group::attach(int rank, int size, const SegmentHandle& handle,
                                     GroupInfo info) {
  return attach(rank, size, std::make_shared<Segment>(Segment::attach(handle)), std::move(info));
}

std::unique_ptr<Group> Group::attach(int rank, int size, std::shared_ptr<Segment> segment,
                                     GroupInfo info) {
  if (segment->bytes() < sizeof(GroupHeader))
    throw CommError("the group's shared memory is too small");
  return std::unique_ptr<Group>(new Group(rank, size, std::move(segment), std::move(info)));
}

Group::Group(int rank, int size, std::shared_ptr<Segment> segment, GroupInfo info)
    : rank_(rank),
      size_(size),
      segment_(std::move(segment)),
      header_(reinterpret_cast<GroupHeader*>(segment_->data())),
      layout_(Layout::read(*header_, segment_->bytes())),
      cache_bytes_(last_level_cache_bytes()),
      info_(std::move(info)),
      peer_mappings_(header_->aborted) {
  if (static_cast<int>(layout_.ranks) != size)
    throw CommError("rank 0 created group " + info_.name + " with " +
                    std::to_string(layout_.ranks) + " ranks, but " + format_rank(rank) +
                    " expects " + std::to_string(size));
  // Pages for long messages are mapped when they are first used; many groups never do.
  segment_->prefault(0, layout_.staging_buffer(0, 0));
  RankState& own = rank_state(rank_);
  int32_t first = 0;
  if (!own.pid.compare_exchange_strong(first, getpid()))
    throw UsageError(abort(format_rank(rank) + " joined group " + info_.name +
                           " twice, as process " + std::to_string(first) + " and as process " +
                           std::to_string(getpid()) + "; give each process its own RANK")
                         .text());
  publish_core_mask();
  probe_ = random_nonce();
  own.probe = probe_;
  own.probe_address = reinterpret_cast<uint64_t>(&probe_);
  liveness_thread_ = std::make_unique<LivenessThread>(own, [this] { return describe_location(); });
}

Group::~Group() { leave(); }

void Group::leave() {
  if (!liveness_thread_) return;
  liveness_thread_.reset();
  rank_state(rank_).phase.wake();
  rank_state(rank_).doorbell.wake();
}

void Group::publish_core_mask() {
  const CoreMask cores = allowed_cores();
  for (size_t word = 0; word < cores.size(); ++word)
    rank_state(rank_).cores[word].store(cores[word], std::memory_order_relaxed);
}

bool Group::is_oversubscribed() {
  if (affinity_polls_.fetch_add(1, std::memory_order_relaxed) % kAffinityPeriod != 0)
    return oversubscribed_.load(std::memory_order_relaxed);
  publish_core_mask();
  int usable = 0;
  for (size_t word = 0; word < kCoreMaskWords; ++word) {
    uint64_t any = 0;
    for (int rank = 0; rank < size_; ++rank)
      any |= rank_state(rank).cores[word].load(std::memory_order_relaxed);
    usable += std::popcount(any);
  }
  oversubscribed_.store(size_ > usable, std::memory_order_relaxed);
  return size_ > usable;
}

std::vector<int> Group::missing_ranks() {
  std::vector<int> absent;
  for (int rank = 0; rank < size_; ++rank)
    if (rank_state(rank).membership.load(std::memory_order_acquire) == Membership::absent)
      absent.push_back(rank);
  return absent;
}

Failure Group::abort(const Failure& failure) {
  uint32_t not_aborted = 0;
  if (header_->aborted.compare_exchange_strong(not_aborted, 1)) {
    header_->loss = failure.loss;
    header_->lost = failure.rank;
    copy_text(header_->text, failure.reason);
    copy_text(header_->hint, failure.hint);
    header_->aborted.store(2, std::memory_order_release);
    for (int rank = 0; rank < size_; ++rank) {
      rank_state(rank).phase.wake();
      rank_state(rank).doorbell.wake();
    }
  }
  return this->failure();
}

Failure Group::failure() {
  const auto until = Clock::now() + std::chrono::seconds(3);
  while (header_->aborted.load(std::memory_order_acquire) == 1 && Clock::now() < until)
    yield_core();
  if (header_->aborted.load(std::memory_order_acquire) != 2)
    return {"another rank aborted the group"};
  return {read_text(header_->text), header_->loss, header_->lost, read_text(header_->hint)};
}

void Group::poll_signals() {
  if (!info_.poll_signals) return;
  try {
    info_.poll_signals();
  } catch (...) {
    abort(format_rank(rank_) + " was interrupted");
    throw;
  }
}

void Group::abort_if_rank_died() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || check_health(rank_state(rank)) != Health::dead) continue;
    abort({format_rank(rank) + " died (process " + std::to_string(rank_state(rank).pid) +
               " has ended)",
           Loss::ended, global_rank(rank)});
    return;
  }
}

int Group::global_rank(int rank) const {
  const auto index = static_cast<size_t>(rank);
  return index < info_.global_ranks.size() ? info_.global_ranks[index] : rank;
}

std::string Group::format_rank(int rank) const {
  return "rank " + std::to_string(global_rank(rank));
}

std::string Group::format_ranks(const std::vector<int>& ranks) const {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    names += (i ? ", " : "") + format_rank(ranks[i]).substr(5);
  return names;
}

const char* op_name(Op op) {
  static const char* const names[] = {"no call",
                                      "barrier",
                                      "broadcast",
                                      "all_reduce",
                                      "reduce",
                                      "all_gather",
                                      "gather",
                                      "scatter",
                                      "reduce_scatter",
                                      "all_to_all",
                                      "reproducible_all_reduce",
                                      "share",
                                      "send",
                                      "recv",
                                      "all_gather_bytes"};
  const auto index = static_cast<size_t>(op);
  return index < sizeof names / sizeof *names ? names[index] : "an unknown call";
}

const char* reduction_name(int reduction) {
  static const char* const names[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                      "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return reduction >= 0 && reduction < 9 ? names[reduction] : "?";
}

std::string Group::describe(const CallInfo& info) const {
  std::string text = op_name(info.op);
  if (info.op == Op::barrier || info.op == Op::none) return text;
  text += '(';
  if (info.op == Op::share || info.op == Op::all_gather_bytes)
    return text + std::to_string(info.count) + " bytes)";
  if (info.op == Op::all_reduce || info.op == Op::reduce || info.op == Op::reduce_scatter)
    text += std::string(reduction_name(info.reduction)) + ", ";
  if (info.kind == TensorKind::sparse) text += "sparse ";
  text += info_.dtype_name ? info_.dtype_name(info.dtype) : "dtype " + std::to_string(info.dtype);
  if (info.kind == TensorKind::on_device) text += " on an accelerator";
  text += ", " + std::to_string(info.count) + " elements";
  if (info.root >= 0)
    text += (info.op == Op::broadcast || info.op == Op::scatter ? ", from " : ", to ") +
            format_rank(info.root);
  if (info.plan_digest) text += ", plan " + std::to_string(info.plan_digest);
  return text + ")";
}

std::string format_seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(time.count()) / 1000);
  return text;
}

void Group::begin_sleep(const std::string& what) {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  sleeping_in_.insert(what);
}

void Group::end_sleep(const std::string& what) {
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  sleeping_in_.erase(sleeping_in_.find(what));
}

std::string Group::describe_location() {
  std::string text = info_.locate ? info_.locate() : "";
  std::lock_guard<std::mutex> lock(sleep_mutex_);
  for (const std::string& what : sleeping_in_)
    text += (text.empty() ? "" : ", ") + ("waiting in " + what);
  return text;
}

std::string Group::describe_peer(int rank) {
  RankState& other = rank_state(rank);
  const uint32_t begun = other.calls_begun.load();
  std::string text = format_rank(rank) + ", ";
  if (begun == 0)
    text += "which has begun no collective on this group yet";
  else
    text += "last seen at #" + std::to_string(begun) + " " +
            op_name(static_cast<Op>(other.last_op.load()));
  const std::string location = request_location(other, std::chrono::milliseconds(1000));
  return text + (location.empty() ? ", which does not answer (stopped, or busy outside Python)"
                                  : ", now " + location);
}

}  // namespace lockstep
