#include "backend.h"

#include <pthread.h>
#include <unistd.h>

#include <sstream>
#include <thread>

#include "collectives/share.h"
#include "errors.h"
#include "torch_errors.h"

namespace lockstep {

// What works in progress need. The queue and the messages are stopped before it is destroyed.
struct LockstepBackend::Core {
  std::unique_ptr<Group> group;
  std::atomic<unsigned long> caller{0};  // the thread that made the last call
};

namespace {

// Aborts the group if a call fails on this rank alone.
void run_in_group(Group& group, const std::function<void()>& call) {
  try {
    call();
  } catch (const CallError&) {
    throw;  // all ranks throw, and the group stays usable
  } catch (const CommError& error) {
    group.abort(error.failure);
    throw;
  } catch (const std::exception& error) {
    group.abort({error.what()});
    throw;
  }
}

class NativeRunner : public CollectiveBackend::Runner {
 public:
  explicit NativeRunner(std::shared_ptr<LockstepBackend::Core> core) : core_(std::move(core)) {}
  void run(const CollectiveBackend::PreparedCall& prepared, std::chrono::milliseconds timeout,
           bool is_background) override {
    run_in_group(*core_->group, [&] {
      CollectiveCall call(*core_->group, prepared.info, timeout, is_background);
      prepared.body(call);
    });
  }

 private:
  const std::shared_ptr<LockstepBackend::Core> core_;
};

}  // namespace

static GroupInfo make_group_info(const std::string& name, std::vector<int> ranks,
                                 LocateThread locate, const std::atomic<unsigned long>& caller,
                                 PollSignals poll_signals) {
  GroupInfo info;
  info.name = CollectiveBackend::shown_name(name);
  info.global_ranks = std::move(ranks);
  info.dtype_name = dtype_name;
  info.dtype_bytes = [](int type) { return c10::elementSize(static_cast<at::ScalarType>(type)); };
  info.locate = [locate, &caller] { return locate ? locate(caller.load()) : std::string(); };
  info.poll_signals = poll_signals;
  return info;
}

LockstepBackend::LockstepBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 std::chrono::milliseconds timeout, std::string name,
                                 std::vector<int> ranks, LocateThread locate,
                                 PollSignals poll_signals, ConnectGloo connect_gloo)
    : FallbackBackend(rank, size, timeout, name, ranks), core_(std::make_shared<Core>()) {
  gloo_ = std::make_shared<GlooFallback>(store, connect_gloo);
  core_->caller = static_cast<unsigned long>(pthread_self());
  try {
    core_->group =
        join(*store, rank, size, timeout,
             make_group_info(name, std::move(ranks), locate, core_->caller, poll_signals));
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  runner_ = std::make_shared<NativeRunner>(core_);
  queue_ = std::make_shared<CallQueue>([core = core_] { core->group->poll_signals(); });
  // A work that is still referenced keeps the group's memory mapped until its message is done.
  p2p_.reset(new PointToPoint(*core_->group), [core = core_](PointToPoint* p2p) { delete p2p; });
}

LockstepBackend::~LockstepBackend() {
  if (shut_down_unless_forked()) return;
  leak(gloo_);
  leak(p2p_);
  leak(core_);
}

void LockstepBackend::shutdown() {
  if (!core_) return;
  check_process();
  queue_->stop();
  p2p_->stop();
  core_->group->leave();
  queue_.reset();
  p2p_.reset();
  gloo_.reset();
  runner_.reset();
  core_.reset();
}

void LockstepBackend::abort() {
  if (!core_) return;
  abort_because({core_->group->format_rank(rank_) + " aborted the group"});
}

void LockstepBackend::abort_because(const Failure& failure) {
  if (!core_) return;
  check_process();
  core_->group->abort(failure);
}

c10d::ErrorType LockstepBackend::getError() {
  if (!core_) return c10d::ErrorType::SUCCESS;
  check_process();
  return core_->group->is_aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

static std::string refusal;  // why calls are refused in this process
static std::atomic<bool> is_refusing{false};

void set_refusal(const std::string& reason) {
  if (!reason.empty()) refusal = reason;
  is_refusing.store(!reason.empty(), std::memory_order_relaxed);
}

static const std::string* current_refusal() {
  return is_refusing.load(std::memory_order_relaxed) ? &refusal : nullptr;
}

void LockstepBackend::note_caller(unsigned long thread) {
  core_->caller.store(thread, std::memory_order_relaxed);
}

void LockstepBackend::set_name(const std::string& name) { core_->group->set_name(name); }

void LockstepBackend::check_permitted(Op op) {
  const std::string* reason = current_refusal();
  if (!reason) return;
  if (size_ == 1 && op == Op::barrier) return;  // it waits for nobody
  const std::string location = core_->group->info().locate();
  CHECK_ARGUMENT(false, core_->group->format_rank(rank_), location.empty() ? "" : ", " + location,
                 ": ", op_name(op), " on group ", core_->group->info().name,
                 " is refused: ", *reason);
}

// ---- joining ----
//
//     all ranks   number = add(members, 1)         round = number / size: the keys of an
//     rank 0      create; set address/round        earlier group are never read again
//     others      wait for address/round; attach; set their membership in the segment
//     all ranks   wait until all ranks are members
//
// A rank that cannot attach sets refused/round, so that nobody waits for it; and before it
// lost/round, if the reason is the end of rank 0.

static std::string serialize(const SegmentHandle& handle) {
  std::ostringstream text;
  text << handle.pid << ' ' << handle.fd << ' ' << handle.bytes << ' ' << handle.nonce.low << ' '
       << handle.nonce.high;
  return text.str();
}

static SegmentHandle deserialize(const std::string& text) {
  SegmentHandle handle;
  std::istringstream stream(text);
  if (!(stream >> handle.pid >> handle.fd >> handle.bytes >> handle.nonce.low >> handle.nonce.high))
    throw CommError("the handle of the group's shared memory is damaged");
  return handle;
}

static std::string to_string(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

// The keys of one group that ranks join.
struct JoinKeys {
  explicit JoinKeys(int64_t round)
      : address("lockstep/address/" + std::to_string(round)),
        refused("lockstep/refused/" + std::to_string(round)),
        lost("lockstep/lost/" + std::to_string(round)) {}
  // Lets all ranks that join fail, too.
  void refuse(c10d::Store& store, const Failure& failure) const {
    if (failure.loss != Loss::none)
      store.set(lost, std::to_string(static_cast<int>(failure.loss)) + ' ' +
                          std::to_string(failure.rank));
    store.set(refused, failure.text());
  }
  // Returns why a rank has refused to join.
  Failure read_refusal(c10d::Store& store) const {
    Failure failure(to_string(store.get(refused)));
    if (!store.check({lost})) return failure;
    std::istringstream stream(to_string(store.get(lost)));
    int loss = 0;
    int rank = -1;
    if (stream >> loss >> rank && loss > 0 && loss <= static_cast<int>(Loss::closed)) {
      failure.loss = static_cast<Loss>(loss);
      failure.rank = rank;
    }
    return failure;
  }

  const std::string address, refused, lost;
};

static std::unique_ptr<Group> attach(c10d::Store& store, const JoinKeys& keys, int rank, int size,
                                     std::chrono::milliseconds timeout, const GroupInfo& info) {
  const auto global_rank = [&info](int rank) {
    return info.global_ranks.empty() ? rank : info.global_ranks[rank];
  };
  const std::string self = "rank " + std::to_string(global_rank(rank));
  const std::string creator = "rank " + std::to_string(global_rank(0));
  try {
    store.wait({keys.address}, timeout);
  } catch (const std::exception&) {
    throw CommError(self + " timed out after " + format_seconds(timeout) + ", waiting for " +
                    creator + " to create group " + info.name);
  }
  const std::string text = to_string(store.get(keys.address));
  if (text.empty()) {
    Failure failure = keys.read_refusal(store);
    failure.reason = creator + " could not create group " + info.name + ": " + failure.reason;
    throw CommError(failure.text(), failure);
  }
  const SegmentHandle handle = deserialize(text);
  Failure failure;
  try {
    return Group::attach(rank, size, handle, info);
  } catch (const UnopenedError& error) {
    failure = {error.what(), Loss::unopened, global_rank(0)};
    failure.hint = ": " + creator +
                   " has ended, or it is on another host or in another container, across which the "
                   "backend gloo connects ranks";
  } catch (const CommError& error) {
    failure = {error.what()};
  }
  failure.reason =
      self + " could not join " + creator + " in group " + info.name + " (" + failure.reason + ")";
  keys.refuse(store, failure);
  throw CommError(failure.text(), failure);
}

std::unique_ptr<Group> LockstepBackend::join(c10d::Store& store, int rank, int size,
                                             std::chrono::milliseconds timeout,
                                             const GroupInfo& info) {
  if (size == 1) return Group::create(1, info);
  const auto begun = Clock::now();
  const JoinKeys keys((store.add("lockstep/members", 1) - 1) / size);
  std::unique_ptr<Group> group;
  if (rank == 0) {
    try {
      group = Group::create(size, info);
    } catch (const std::exception& error) {
      keys.refuse(store, {error.what()});
      store.set(keys.address, "");
      throw;
    }
    store.set(keys.address, serialize(group->segment()->handle()));
  } else {
    group = attach(store, keys, rank, size, timeout, info);
  }
  auto next_check = begun + std::chrono::milliseconds(100);
  for (auto missing = group->missing_ranks(); !missing.empty(); missing = group->missing_ranks()) {
    group->poll_signals();
    const auto now = Clock::now();
    if (now > next_check) {
      next_check = now + std::chrono::milliseconds(100);
      if (store.check({keys.refused})) group->abort(keys.read_refusal(store));
      group->abort_if_rank_died();  // one that has joined; its absence from calls would show later
    }
    if (now - begun > timeout)
      group->abort({"group " + info.name + ": " + group->format_ranks(missing) +
                    " did not join within " + format_seconds(timeout) + " (timed out)"});
    if (group->is_aborted()) throw CommError(group->failure().text(), group->failure());
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (rank == 0) {
    group->segment()->close_descriptor();
    store.deleteKey(keys.address);
  }
  return group;
}

// ---- calls that c10d does not have ----

WorkPtr LockstepBackend::reproducible_all_reduce(Bucket bucket, at::Tensor packed,
                                                 at::Tensor result, at::Tensor present,
                                                 std::optional<at::Tensor> own, bool in_steps) {
  const char* op = "reproducible_all_reduce";
  CHECK_ARGUMENT(result.is_floating_point() && data_type_of(result.scalar_type()) == bucket.type,
                 op, ": supports floating-point tensors with the dtype of the bucket, not ",
                 dtype_name(static_cast<int>(result.scalar_type())));
  CHECK_ARGUMENT(static_cast<int>(bucket.holders.size()) == size_, op, ": holders for ",
                 bucket.holders.size(), " ranks in a group of ", size_);
  CHECK_ARGUMENT(is_plain(packed) && is_plain(result) && is_plain(present) &&
                     packed.nbytes() >= packed_bytes(bucket, rank_) &&
                     result.numel() >= static_cast<int64_t>(bucket.length) &&
                     present.nbytes() >= bucket.members.size(),
                 op, ": a buffer is too small or not contiguous");
  CHECK_ARGUMENT(!own || (is_plain(*own) && own->scalar_type() == result.scalar_type() &&
                          own->numel() == static_cast<int64_t>(bucket.length)),
                 op, ": `own` must have the length and dtype of the bucket");
  CHECK_ARGUMENT(
      Heap::instance().find(packed.data_ptr(), packed_bytes(bucket, rank_)).is_shared() &&
          (bucket.scatter || Heap::instance().find(result.data_ptr(), result.nbytes()).is_shared()),
      op, ": the buffers must be in shared memory (lockstep.comm.shared_memory.empty_shared)");
  try {
    check(bucket, rank_, static_cast<char*>(packed.data_ptr()),
          static_cast<char*>(result.data_ptr()));
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  CallInfo info;
  info.op = Op::reproducible_all_reduce;
  info.dtype = static_cast<uint8_t>(result.scalar_type());
  info.count = bucket.length;
  info.plan_digest = bucket.digest();
  const char* values = own ? static_cast<const char*>(own->data_ptr()) : nullptr;
  auto* const nodes = static_cast<char*>(packed.data_ptr());
  auto* const sums = static_cast<char*>(result.data_ptr());
  const auto mark = [present](const std::vector<bool>& is_new) { write_flags(present, is_new); };
  if (in_steps) {
    auto sum = std::make_shared<SteppedSum>(*core_->group, info, std::move(bucket), nodes, sums,
                                            values, options_->timeout);
    // The tensors keep the memory; the core, the group.
    auto guarded = [core = core_, packed, result, own](const std::function<void()>& step) {
      run_in_group(*core->group, step);
    };
    return start_in_steps(
        Op::reproducible_all_reduce, {result},
        [sum, guarded, mark](bool is_background) {
          guarded([&] { sum->finish(is_background); });
          mark(sum->is_new());
        },
        [sum, guarded, mark] {
          Progress progress = Progress::waiting;
          guarded([&] { progress = sum->advance(); });
          if (progress == Progress::executed) mark(sum->is_new());
          return progress;
        });
  }
  Body body = [bucket = std::move(bucket), packed, result, own, nodes, sums, values,
               mark](CollectiveCall& call) {
    mark(lockstep::reproducible_all_reduce(call, bucket, nodes, sums, values));
  };
  return start(c10d::OpType::UNKNOWN, {result}, {{info, std::move(body)}},
               std::chrono::milliseconds(0), true, {});
}

std::vector<std::string> LockstepBackend::all_gather_bytes(std::string message) {
  CHECK_ARGUMENT(message.size() <= longest_message(), "all_gather_bytes: a message of ",
                 message.size(), " bytes is longer than ", longest_message());
  CallInfo info;
  info.op = Op::all_gather_bytes;
  info.count = message.size();
  info.uneven = 1;
  // Shared with the call: in a coalescing manager that an exception has left it is queued, and
  // outlives an error of the wait.
  auto messages = std::make_shared<std::vector<std::string>>();
  Body body = [message = std::move(message), messages](CollectiveCall& call) {
    for (const std::string_view each : lockstep::all_gather_bytes(call, message))
      messages->emplace_back(each);
  };
  start(c10d::OpType::UNKNOWN, {}, {{info, std::move(body)}}, std::chrono::milliseconds(0), false,
        {})
      ->wait(kNoTimeout);
  return std::move(*messages);
}

size_t LockstepBackend::longest_message() {
  check_usable();
  return lockstep::longest_message(core_->group->layout());
}

void LockstepBackend::advance() {
  check_usable();
  queue_->advance();
}

at::Tensor LockstepBackend::share(int64_t bytes) {
  CHECK_ARGUMENT(bytes >= 0, "share: negative number of bytes: ", bytes);
  CallInfo info;
  info.op = Op::share;
  info.count = static_cast<uint64_t>(bytes);
  auto segment = std::make_shared<std::unique_ptr<Segment>>();
  Body body = [segment, bytes](CollectiveCall& call) {
    *segment = lockstep::share(call, static_cast<uint64_t>(bytes));
  };
  start(c10d::OpType::UNKNOWN, {}, {{info, std::move(body)}}, std::chrono::milliseconds(0), false,
        {});
  char* data = (*segment)->data() + kSharedStart;
  return at::from_blob(
      data, {bytes}, [segment](void*) { segment->reset(); }, at::TensorOptions().dtype(at::kByte));
}

// ---- messages ----

WorkPtr LockstepBackend::start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  const bool is_send = type == c10d::OpType::SEND;
  at::Tensor buffer;
  std::optional<OutputTensor> output;
  if (is_send) {
    buffer = as_input("send", tensors[0]);
  } else {
    output.emplace("recv", tensors[0], false);
    buffer = output->plain();
  }
  auto work =
      c10::make_intrusive<MessageWork>(type, tensors, p2p_, std::move(buffer), std::move(output));
  try {
    work->start(is_send ? Op::send : Op::recv, peer, tag, options_->timeout);
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  return work;
}

}  // namespace lockstep
