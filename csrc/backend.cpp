#include "backend.h"

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <sstream>
#include <thread>

#include "failure.h"

namespace lockstep {

// What works that are under way need; the queue and the mail are ended before it.
struct LockstepBackend::Inside {
  std::unique_ptr<Group> group;
  std::atomic<unsigned long> caller{0};  // the thread that called last
};

static Naming naming_of(std::string name, std::vector<int> ranks, Where where,
                        const std::atomic<unsigned long>& caller, Hear hear) {
  Naming naming;
  naming.group = name.empty() || name == "0" ? "default" : std::move(name);
  naming.ranks = std::move(ranks);
  naming.dtype = dtype_name;
  naming.where = [where, &caller] { return where ? where(caller.load()) : std::string(); };
  naming.hear = hear;
  return naming;
}

LockstepBackend::LockstepBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 std::chrono::milliseconds timeout, std::string name,
                                 std::vector<int> ranks, Where where, Hear hear)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>("lockstep", timeout)),
      inside_(std::make_shared<Inside>()) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size && (ranks.empty() || ranks.size() == size_t(size)),
                    "a group of ", size, " can't have a rank ", rank, " and ", ranks.size(),
                    " global ranks");
  for (int global : ranks) options_->global_ranks_in_group.push_back(static_cast<uint64_t>(global));
  options_->group_name = name;
  inside_->caller = static_cast<unsigned long>(pthread_self());
  try {
    inside_->group = join(*store, rank, size, timeout,
                          naming_of(std::move(name), std::move(ranks), where, inside_->caller, hear));
  } catch (...) {
    std::rethrow_exception(as_torch_error());
  }
  queue_ = std::make_shared<Queue>([inside = inside_] { inside->group->hear(); });
  // A message that is still held keeps the memory that it may yet be copied from.
  mail_.reset(new Mail(*inside_->group), [inside = inside_](Mail* mail) { delete mail; });
}

// Never destroys what `pointer` holds.
template <typename T>
static void leak(std::shared_ptr<T>& pointer) {
  (void)new std::shared_ptr<T>(std::move(pointer));
}

LockstepBackend::~LockstepBackend() {
  if (process_ != this_process()) {
    // Ending the group in a forked child would tell the other ranks that this rank has left.
    // Even destroying a condition variable waits for ever there: for the threads that slept
    // on it at the fork, which the child does not have.
    leak(queue_);
    leak(mail_);
    leak(inside_);
    return;
  }
  // Our threads may want the interpreter before they end, so we must not hold it.
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    shutdown();
  } else {
    shutdown();
  }
}

void LockstepBackend::shutdown() {
  if (!inside_) return;
  check_process();
  queue_->stop();
  mail_->stop();
  inside_->group->leave();
  queue_.reset();
  mail_.reset();
  inside_.reset();
}

void LockstepBackend::abort() {
  if (!inside_) return;
  check_process();
  inside_->group->abort(inside_->group->name_of(rank_) + " aborted the group");
}

c10d::ErrorType LockstepBackend::getError() {
  if (!inside_) return c10d::ErrorType::SUCCESS;
  check_process();
  return inside_->group->aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void LockstepBackend::check_process() const {
  if (process_ == this_process()) return;
  const Group& group = *inside_->group;
  C10_THROW_ERROR(
      DistBackendError,
      group.name_of(rank_) + ": process " + std::to_string(this_process()) +
          " is a fork of process " + std::to_string(process_) + ", which joined group " +
          group.naming().group + ", and cannot use the group: make this call in process " +
          std::to_string(process_) +
          ", or start the new process by spawning it and let it join a group of its own");
}

void LockstepBackend::check_open() {
  if (!inside_) C10_THROW_ERROR(DistBackendError, "the group was destroyed");
  check_process();
  inside_->caller.store(static_cast<unsigned long>(pthread_self()), std::memory_order_relaxed);
  take_name();
}

void LockstepBackend::take_name() {
  // torch tells the name that the user gave only after the group was made.
  const std::string& given = getGroupDesc();
  if (calls_ == 0 && !given.empty() && given != "undefined" && given != "default_pg")
    inside_->group->rename(given);
}

void LockstepBackend::check_root(const char* op, int root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, op, ": there is no rank ", root,
                    " in a group of ", size_);
}

at::Tensor LockstepBackend::allocateTensor(long size, at::TensorOptions options) {
  try {
    return shared_empty({size}, c10::typeMetaToScalarType(options.dtype()));
  } catch (...) {
    std::rethrow_exception(as_torch_error());
  }
}

// ---- joining ----
//
//     everybody   number = add(members, 1)         round = number / size: keys of an
//     rank 0      create; set address/round        earlier group are never read again
//     others      wait for address/round; attach; raise their hand in the segment
//     everybody   wait until all hands are up
//
// Who cannot attach says so under refused/round, and then nobody waits for it.

static std::string written(const Address& address) {
  std::ostringstream text;
  text << address.pid << ' ' << address.fd << ' ' << address.bytes << ' ' << address.nonce.low
       << ' ' << address.nonce.high;
  return text.str();
}

static Address parsed(const std::string& text) {
  Address address;
  std::istringstream stream(text);
  if (!(stream >> address.pid >> address.fd >> address.bytes >> address.nonce.low >>
        address.nonce.high))
    throw Failure("the address of the group's shared memory is damaged");
  return address;
}

static std::string text_of(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

static std::unique_ptr<Group> attach(c10d::Store& store, const std::string& key,
                                     const std::string& refused, int rank, int size,
                                     std::chrono::milliseconds timeout, const Naming& naming) {
  Address address;
  const std::string who = "rank " + std::to_string(naming.ranks.empty() ? rank : naming.ranks[rank]);
  const std::string host =
      "rank " + std::to_string(naming.ranks.empty() ? 0 : naming.ranks[0]);
  try {
    store.wait({key}, timeout);
  } catch (const std::exception&) {
    throw Failure(who + " waited " + seconds(timeout) + " for " + host + " to create group " +
                  naming.group);
  }
  const std::string text = text_of(store.get(key));
  if (text.empty())
    throw Failure(host + " could not create group " + naming.group + ": " +
                  text_of(store.get(refused)));
  address = parsed(text);
  try {
    return Group::attach(rank, size, address, naming);
  } catch (const Failure& error) {
    const std::string text =
        who + " could not join " + host + " in group " + naming.group + " (" + error.what() +
        "): the backend lockstep serves ranks of one host; use the backend gloo across hosts";
    store.set(refused, text);
    throw Failure(text);
  }
}

std::unique_ptr<Group> LockstepBackend::join(c10d::Store& store, int rank, int size,
                                             std::chrono::milliseconds timeout,
                                             const Naming& naming) {
  if (size == 1) return Group::create(1, naming);
  const auto begun = Clock::now();
  const std::string round = std::to_string((store.add("lockstep/members", 1) - 1) / size);
  const std::string key = "lockstep/address/" + round, refused = "lockstep/refused/" + round;
  std::unique_ptr<Group> group;
  if (rank == 0) {
    try {
      group = Group::create(size, naming);
    } catch (const std::exception& error) {
      store.set(refused, error.what());
      store.set(key, "");
      throw;
    }
    store.set(key, written(group->segment()->address()));
  } else {
    group = attach(store, key, refused, rank, size, timeout, naming);
  }
  auto look = begun + std::chrono::milliseconds(100);
  for (auto absent = group->missing(); !absent.empty(); absent = group->missing()) {
    if (group->aborted()) throw Failure(group->reason());
    group->hear();
    const auto now = Clock::now();
    if (now > look && store.check({refused})) {
      const std::string text = text_of(store.get(refused));
      group->abort(text);
      throw Failure(text);
    }
    if (now > look) look = now + std::chrono::milliseconds(100);
    if (now - begun > timeout)
      throw Failure(group->abort("group " + naming.group + ": " + group->names_of(absent) +
                                 " did not join within " + seconds(timeout)));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (rank == 0) {
    group->segment()->seal();
    store.deleteKey(key);
  }
  return group;
}

// ---- running ----

WorkPtr LockstepBackend::start(c10d::OpType type, Tensors outputs, std::vector<Plan> plans,
                               std::chrono::milliseconds timeout, bool asynchronous,
                               std::vector<Writable> settled) {
  check_open();
  calls_ += plans.size();
  if (timeout <= std::chrono::milliseconds(0)) timeout = options_->timeout;
  auto body = [inside = inside_, plans = std::move(plans), settled = std::move(settled),
               timeout](bool background) {
    for (const Plan& plan : plans) {
      try {
        Turn turn(*inside->group, plan.call, timeout, background);
        plan.body(turn);
      } catch (const Refusal&) {
        throw;  // everybody knows, and the group can go on
      } catch (const std::exception& error) {
        inside->group->abort(error.what());
        throw;
      }
    }
    for (const Writable& tensor : settled) tensor.settle();
  };
  auto work = c10::make_intrusive<CollectiveWork>(type, std::move(outputs), queue_, std::move(body));
  if (coalescing_) asynchronous = true;
  work->start(asynchronous);
  if (coalescing_) coalesce(work);
  return work;
}

void LockstepBackend::startCoalescing() {
  check_open();
  coalescing_ = true;
  coalesced_.clear();
}

void LockstepBackend::coalesce(const WorkPtr& work) {
  // What is over need not be waited for: a coalescing that an exception broke off never
  // ends, and must not hold all that follows.
  std::erase_if(coalesced_, [](const WorkPtr& each) {
    return each->isCompleted() && each->isSuccess();
  });
  coalesced_.push_back(work);
}

WorkPtr LockstepBackend::endCoalescing() {
  check_open();
  coalescing_ = false;
  return c10::make_intrusive<ManyWork>(std::exchange(coalesced_, {}), std::vector<Tensors>());
}

// ---- messages ----

WorkPtr LockstepBackend::message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  check_open();
  const bool sending = type == c10d::OpType::SEND;
  const char* op = sending ? "send" : "recv";
  TORCH_CHECK_VALUE(tensors.size() == 1, op, " takes one tensor");
  TORCH_CHECK_VALUE((peer >= 0 || type == c10d::OpType::RECVANYSOURCE) && peer < size_, op,
                    ": there is no rank ", peer, " in a group of ", size_);
  at::Tensor kept;
  std::optional<Writable> written;
  if (sending) {
    kept = readable(op, tensors[0]);
  } else {
    written.emplace(op, tensors[0], false);
    kept = written->plain();
  }
  ++calls_;
  auto work = c10::make_intrusive<MessageWork>(type, tensors, mail_, std::move(kept),
                                               std::move(written));
  try {
    work->start(sending ? Op::send : Op::recv, peer, tag, options_->timeout);
  } catch (...) {
    std::rethrow_exception(as_torch_error());
  }
  return work;
}

WorkPtr LockstepBackend::send(Tensors& tensors, int target, int tag) {
  return message(c10d::OpType::SEND, tensors, target, tag);
}

WorkPtr LockstepBackend::recv(Tensors& tensors, int source, int tag) {
  return message(c10d::OpType::RECV, tensors, source, tag);
}

WorkPtr LockstepBackend::recvAnysource(Tensors& tensors, int tag) {
  return message(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
}

}  // namespace lockstep
