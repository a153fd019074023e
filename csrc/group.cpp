#include "group.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "channel.h"
#include "failure.h"

namespace lockstep {

constexpr uint32_t kLook = 64;  // calls between two looks at the cores

static uint64_t header_bytes() { return sizeof(Header); }

std::unique_ptr<Group> Group::create(int size, Naming naming) {
  if (size < 1 || size > kMaxRanks)
    throw Misuse("group " + naming.group + " has " + std::to_string(size) +
                 " ranks; the backend lockstep serves 1 to " + std::to_string(kMaxRanks));
  const Layout layout = Layout::chosen(size);
  auto segment = std::make_shared<Segment>(
      Segment::create("lockstep-group", layout.total(), layout.total()));
  auto* header = reinterpret_cast<Header*>(segment->data());
  const Seal seal = header->seal;
  new (header) Header;
  header->seal = seal;
  layout.write(*header);
  for (int rank = 0; rank < size; ++rank)
    prepare_lock(*new (segment->data() + layout.record(rank)) Record);
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) new (segment->data() + layout.channel(from, to)) Channel;
  return std::unique_ptr<Group>(new Group(0, size, std::move(segment), std::move(naming)));
}

std::unique_ptr<Group> Group::attach(int rank, int size, const Address& address, Naming naming) {
  return attach(rank, size, std::make_shared<Segment>(Segment::attach(address)),
                std::move(naming));
}

std::unique_ptr<Group> Group::attach(int rank, int size, std::shared_ptr<Segment> segment,
                                     Naming naming) {
  if (segment->bytes() < header_bytes()) throw Failure("the group's shared memory is too small");
  return std::unique_ptr<Group>(new Group(rank, size, std::move(segment), std::move(naming)));
}

Group::Group(int rank, int size, std::shared_ptr<Segment> segment, Naming naming)
    : rank_(rank),
      size_(size),
      segment_(std::move(segment)),
      header_(reinterpret_cast<Header*>(segment_->data())),
      layout_(Layout::read(*header_, segment_->bytes())),
      naming_(std::move(naming)),
      neighbours_(header_->aborted) {
  if (static_cast<int>(layout_.ranks) != size)
    throw Failure("rank 0 made group " + naming_.group + " for " + std::to_string(layout_.ranks) +
                  " ranks, " + name_of(rank) + " wants " + std::to_string(size));
  segment_->prefault(0, layout_.total());
  Record& own = record(rank_);
  int32_t first = 0;
  if (!own.pid.compare_exchange_strong(first, getpid()))
    throw Misuse(abort(name_of(rank) + " is twice in group " + naming_.group + ", as process " +
                       std::to_string(first) + " and as " + std::to_string(getpid()) +
                       "; give every process a rank of its own (RANK)"));
  publish_cores();
  proof_ = random_nonce();
  own.proof = proof_;
  own.proof_address = reinterpret_cast<uint64_t>(&proof_);
  keeper_ = std::make_unique<Keeper>(own, [this] { return site(); });
}

Group::~Group() { leave(); }

void Group::leave() {
  if (!keeper_) return;
  keeper_.reset();
  record(rank_).step.wake();
  record(rank_).bell.wake();
}

void Group::publish_cores() {
  const Cores cores = usable_cores();
  for (size_t word = 0; word < cores.size(); ++word)
    record(rank_).cores[word].store(cores[word], std::memory_order_relaxed);
}

bool Group::crowded() {
  if (looks_.fetch_add(1, std::memory_order_relaxed) % kLook != 0)
    return crowded_.load(std::memory_order_relaxed);
  publish_cores();
  int usable = 0;
  for (size_t word = 0; word < kCoreWords; ++word) {
    uint64_t any = 0;
    for (int rank = 0; rank < size_; ++rank)
      any |= record(rank).cores[word].load(std::memory_order_relaxed);
    usable += std::popcount(any);
  }
  crowded_.store(size_ > usable, std::memory_order_relaxed);
  return size_ > usable;
}

std::vector<int> Group::missing() {
  std::vector<int> absent;
  for (int rank = 0; rank < size_; ++rank)
    if (record(rank).state.load(std::memory_order_acquire) == State::absent)
      absent.push_back(rank);
  return absent;
}

std::string Group::abort(const std::string& reason) {
  uint32_t nobody = 0;
  if (header_->aborted.compare_exchange_strong(nobody, 1)) {
    copy_text(header_->text, reason);
    header_->aborted.store(2, std::memory_order_release);
    for (int rank = 0; rank < size_; ++rank) {
      record(rank).step.wake();
      record(rank).bell.wake();
    }
  }
  return this->reason();
}

std::string Group::reason() {
  const auto until = Clock::now() + std::chrono::seconds(3);
  while (header_->aborted.load(std::memory_order_acquire) == 1 && Clock::now() < until)
    yield_core();
  return header_->aborted.load(std::memory_order_acquire) == 2
             ? read_text(header_->text)
             : "another rank gave the group up";
}

void Group::hear() {
  if (!naming_.hear) return;
  try {
    naming_.hear();
  } catch (...) {
    abort(name_of(rank_) + " was interrupted");
    throw;
  }
}

void Group::check_deaths() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_ || health(record(rank)) != Health::dead) continue;
    abort(name_of(rank) + " died (process " + std::to_string(record(rank).pid) + " has ended)");
    return;
  }
}

std::string Group::name_of(int rank) const {
  const auto index = static_cast<size_t>(rank);
  return "rank " + std::to_string(index < naming_.ranks.size() ? naming_.ranks[index] : rank);
}

std::string Group::names_of(const std::vector<int>& ranks) const {
  std::string names = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    names += (i ? ", " : "") + name_of(ranks[i]).substr(5);
  return names;
}

const char* op_name(Op op) {
  static const char* const names[] = {"no call",    "barrier", "broadcast",     "all_reduce",
                                      "reduce",     "all_gather", "gather",     "scatter",
                                      "reduce_scatter", "all_to_all", "exact_sum", "share", "send",
                                      "recv"};
  const auto index = static_cast<size_t>(op);
  return index < sizeof names / sizeof *names ? names[index] : "an unknown call";
}

const char* reduction_name(int reduction) {
  static const char* const names[] = {"SUM", "AVG",  "PRODUCT", "MIN",       "MAX",
                                      "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return reduction >= 0 && reduction < 9 ? names[reduction] : "?";
}

std::string Group::described(const Call& call) const {
  std::string text = op_name(call.op);
  if (call.op == Op::barrier || call.op == Op::none) return text;
  text += "(";
  if (call.op == Op::share) return text + std::to_string(call.count) + " bytes)";
  if (call.op == Op::all_reduce || call.op == Op::reduce || call.op == Op::reduce_scatter)
    text += std::string(reduction_name(call.reduction)) + ", ";
  text += naming_.dtype ? naming_.dtype(call.dtype) : "dtype " + std::to_string(call.dtype);
  text += ", " + std::to_string(call.count) + " elements";
  if (call.root >= 0) text += (call.op == Op::broadcast || call.op == Op::scatter ? ", from " : ", to ") + name_of(call.root);
  if (call.plan) text += ", plan " + std::to_string(call.plan % 10000);
  return text + ")";
}

std::string seconds(std::chrono::milliseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(time.count()) / 1000);
  return text;
}

void Group::fall_asleep(const std::string& in) {
  std::lock_guard<std::mutex> lock(sleeping_);
  asleep_.insert(in);
}

void Group::wake_up(const std::string& in) {
  std::lock_guard<std::mutex> lock(sleeping_);
  asleep_.erase(asleep_.find(in));
}

std::string Group::site() {
  std::string text = naming_.where ? naming_.where() : "";
  std::lock_guard<std::mutex> lock(sleeping_);
  for (const std::string& in : asleep_) text += (text.empty() ? "" : ", ") + ("waiting in " + in);
  return text;
}

std::string Group::whereabouts(int rank) {
  Record& other = record(rank);
  const uint32_t begun = other.calls_begun.load();
  std::string text = name_of(rank) + ", ";
  if (begun == 0)
    text += "which has not called anything on this group yet";
  else
    text += "last seen at #" + std::to_string(begun) + " " +
            op_name(static_cast<Op>(other.last_op.load()));
  const std::string site = ask(other, std::chrono::milliseconds(1000));
  return text + (site.empty() ? ", which does not answer (stopped, or busy outside Python)"
                              : ", now " + site);
}

Turn::Turn(Group& group, const Call& call, std::chrono::milliseconds timeout, bool background)
    : group_(group),
      number_(++group.calls_),
      parity_(static_cast<int>(number_ & 1)),
      patience_(Patience::of(group.crowded(), background)),
      timeout_(timeout),
      begun_(Clock::now()) {
  target_ = group_.step_;
  Record& own = group_.record(rank());
  own.calls[parity_] = call;
  own.last_op.store(static_cast<uint32_t>(call.op), std::memory_order_relaxed);
  own.calls_begun.store(number_, std::memory_order_relaxed);
  if (stopped()) check();
}

void Turn::arrive() {
  sync();
  const Call& own = mine();
  for (int rank = 0; rank < size(); ++rank)
    if (!own.agrees(call(rank))) disagree();
}

uint32_t Turn::post() {
  group_.record(rank()).step.post(++group_.step_);
  return group_.step_;
}

void Turn::wait_step(uint32_t step) {
  target_ = step;
  // From the next rank on: not all look at rank 0 first.
  for (int ahead = 1; ahead < size(); ++ahead) {
    Flag& flag = group_.record((rank() + ahead) % size()).step;
    if (reached(flag.value.load(std::memory_order_acquire), step)) continue;
    wait_for(flag, [step](uint32_t value) { return reached(value, step); }, patience_, *this);
  }
}

void Turn::check() {
  if (group_.aborted()) fail(group_.reason());
  group_.hear();
  group_.check_deaths();
  if (group_.aborted()) fail(group_.reason());
  for (int rank = 0; rank < size(); ++rank)
    if (health(group_.record(rank)) == Health::left &&
        !reached(group_.record(rank).step.value.load(std::memory_order_acquire), target_))
      fail(group_.abort(group_.name_of(rank) + " has left the group"));
  if (Clock::now() - begun_ > timeout_) late();
}

void Turn::rest(bool resting) {
  const std::string in = std::string(op_name(mine().op)) + " #" + std::to_string(number_);
  if (resting) group_.fall_asleep(in);
  if (group_.resting) group_.resting(resting);
  if (!resting) group_.wake_up(in);
}

void Turn::late() {
  std::vector<int> absent;
  for (int rank = 0; rank < size(); ++rank)
    if (!reached(group_.record(rank).step.value.load(std::memory_order_acquire), target_))
      absent.push_back(rank);
  if (absent.empty()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun_);
  std::string text = group_.name_of(rank()) + " waited " + seconds(waited) + " (limit " +
                     seconds(timeout_) + ") in " + op_name(mine().op) + " #" +
                     std::to_string(number_) + " for " + group_.whereabouts(absent[0]);
  absent.erase(absent.begin());
  if (!absent.empty()) text += "; also for " + group_.names_of(absent);
  fail(group_.abort(text));
}

void Turn::fail(const std::string& reason) {
  const char* op = op_name(mine().op);
  throw Failure(group_.name_of(rank()) + ": " + op + " #" + std::to_string(number_) +
                " on group " + group_.naming_.group + " failed: " + reason);
}

void Turn::disagree() {
  // Everybody is here: all have arrived and all compare the same calls.
  const std::string site = group_.naming_.where ? group_.naming_.where() : "";
  group_.keeper_->say(group_.described(mine()) + (site.empty() ? "" : " " + site));
  sync();
  std::vector<std::pair<std::string, std::vector<int>>> sides;
  for (int rank = 0; rank < size(); ++rank) {
    const std::string text = read_text(group_.record(rank).site);
    bool known = false;
    for (auto& side : sides)
      if (side.first == text) {
        side.second.push_back(rank);
        known = true;
      }
    if (!known) sides.push_back({text, {rank}});
  }
  sync();  // before anybody writes its next text
  std::string text = group_.name_of(rank()) + ": the ranks of group " + group_.naming_.group +
                     " disagree in call #" + std::to_string(number_) + ": ";
  for (size_t i = 0; i < sides.size(); ++i)
    text += (i ? "; " : "") + group_.names_of(sides[i].second) + " called " + sides[i].first;
  throw Disagreement(text);
}

}  // namespace lockstep
