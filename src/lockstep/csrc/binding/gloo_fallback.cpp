#include "gloo_fallback.h"

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <sstream>
#include <thread>
#include <vector>

#include "errors.h"

namespace lockstep {

// All ranks have arrived at the call when they connect. A rank that dies after it has published its
// address is noticed only at the end of this time.
constexpr std::chrono::seconds kConnectTimeout{10};
constexpr std::chrono::milliseconds kStorePeriod{2};    // between looks at the store
constexpr std::chrono::milliseconds kCheckPeriod{200};  // between looks at the other ranks
constexpr int kClosingTag = (1U << 31) - 1;             // of a message that nobody sends

namespace {

// A store whose waits notice that a rank has died, that the group was aborted, and signals.
class WatchedStore : public c10d::PrefixStore {
 public:
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store,
               CollectiveCall& call)
      : PrefixStore(prefix, std::move(store)), call_(&call) {}
  void forget_call() { call_ = nullptr; }                 // Gloo keeps the store
  bool hasExtendedApi() const override { return false; }  // some of its calls wait by themselves
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, getTimeout());
    return PrefixStore::get(key);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    const auto begun = Clock::now();
    while (call_ && !check(keys)) {
      call_->check();
      if (Clock::now() - begun > timeout)
        throw CommError("another rank did not connect within " + format_seconds(timeout) +
                        " (timed out)");
      std::this_thread::sleep_for(kStorePeriod);
    }
    PrefixStore::wait(keys, timeout);
  }

 private:
  CollectiveCall* call_;
};

// What this rank is seen to wait in, for other ranks and for reports of hangs.
struct SleepInGloo {
  explicit SleepInGloo(CollectiveCall& call) : call_(call) { call_.on_sleep(true); }
  ~SleepInGloo() { call_.on_sleep(false); }
  CollectiveCall& call_;
};

}  // namespace

// Waits in parts, because Gloo does not notice that a rank has failed elsewhere.
static void wait_for_gloo(CollectiveCall& call, c10d::Work& work) {
  const SleepInGloo sleep(call);
  while (!work.isCompleted()) {
    try {
      work.wait(kCheckPeriod);
    } catch (const std::exception&) {  // it is not complete yet, or has failed
    }
    if (work.isCompleted()) return;
    call.check();
    call.on_idle();
  }
}

static std::string first_line(const std::string& message) {
  std::istringstream text(message);
  std::string line;
  std::getline(text, line);
  return line;
}

void GlooFallback::run(CollectiveCall& call, const Start& start,
                       std::chrono::milliseconds timeout) {
  call.arrive();
  std::string refusal;
  try {
    refusal = start_and_wait(call, start, timeout);
  } catch (...) {
    close();
    throw;
  }
  call.begin_waiting(true);
  call.sync();
  if (!refusal.empty()) call.refuse("Gloo refuses the tensors: " + refusal);
}

// Returns why Gloo refuses such tensors, or "". The other errors end the group.
std::string GlooFallback::start_and_wait(CollectiveCall& call, const Start& start,
                                         std::chrono::milliseconds timeout) {
  try {
    if (!gloo_) gloo_ = connect(call, timeout);
    gloo_->setTimeout(timeout);
    const auto work = start(*gloo_);
    wait_for_gloo(call, *work);
    work->wait(kNoTimeout);
    return "";
  } catch (const c10::Error& error) {  // of torch's checks and kernels
    return first_line(error.what_without_backtrace());
  } catch (const pybind11::error_already_set&) {  // of a signal handler
    throw;
  } catch (const std::exception& error) {  // of the network
    call.check();                          // another rank may be the cause
    call.abort(call.group().format_rank(call.rank()) +
               " failed in Gloo: " + first_line(error.what()));
  }
}

c10::intrusive_ptr<c10d::Backend> GlooFallback::connect(CollectiveCall& call,
                                                        std::chrono::milliseconds timeout) {
  // All ranks of this group know the number of its segment, and those of no other group do.
  const Nonce& nonce = call.group().header().segment.nonce;
  const std::string prefix =
      "lockstep/gloo/" + std::to_string(nonce.high) + "-" + std::to_string(nonce.low);
  const auto limit = std::min<std::chrono::milliseconds>(timeout, kConnectTimeout);
  const auto store = c10::make_intrusive<WatchedStore>(prefix, store_, call);
  auto gloo = connect_(store, call.rank(), call.size(), limit);
  store->forget_call();
  return gloo;
}

// Closes the connections, so that no thread of Gloo waits any longer, here and on other ranks.
void GlooFallback::close() {
  if (!gloo_) return;
  // Gloo closes all connections of a process in which a wait for a message times out, and has no
  // other way to wake its threads.
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  for (int rank = 0; rank < gloo_->getSize(); ++rank) {
    if (rank == gloo_->getRank()) continue;
    try {
      gloo_->recv(nothing, rank, kClosingTag)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {  // it timed out, or is closed already
    }
  }
  gloo_ = nullptr;
}

}  // namespace lockstep
