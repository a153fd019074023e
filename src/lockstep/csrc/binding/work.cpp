#include "work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "activity.h"
#include "errors.h"
#include "torch_errors.h"

namespace lockstep {

[[noreturn]] static void throw_unfinished(const std::string& what,
                                          std::chrono::milliseconds timeout) {
  throw TorchError(CommError(what + " timed out: it was not finished after " +
                             format_seconds(timeout) + "; it continues in the background"));
}

// The name of an operation in torch's profilers; nullptr if none is recording.
static const char* profiler_name(c10d::OpType type) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return nullptr;
  switch (type) {
    case c10d::OpType::BROADCAST: return "lockstep:broadcast";
    case c10d::OpType::ALLREDUCE: return "lockstep:all_reduce";
    case c10d::OpType::ALLREDUCE_COALESCED: return "lockstep:all_reduce";
    case c10d::OpType::REDUCE: return "lockstep:reduce";
    case c10d::OpType::ALLGATHER: return "lockstep:all_gather";
    case c10d::OpType::_ALLGATHER_BASE: return "lockstep:all_gather";
    case c10d::OpType::ALLGATHER_COALESCED: return "lockstep:all_gather";
    case c10d::OpType::GATHER: return "lockstep:gather";
    case c10d::OpType::SCATTER: return "lockstep:scatter";
    case c10d::OpType::REDUCE_SCATTER: return "lockstep:reduce_scatter";
    case c10d::OpType::_REDUCE_SCATTER_BASE: return "lockstep:reduce_scatter";
    case c10d::OpType::ALLTOALL: return "lockstep:all_to_all";
    case c10d::OpType::ALLTOALL_BASE: return "lockstep:all_to_all";
    case c10d::OpType::BARRIER: return "lockstep:barrier";
    case c10d::OpType::SEND: return "lockstep:send";
    case c10d::OpType::RECV: return "lockstep:recv";
    case c10d::OpType::RECVANYSOURCE: return "lockstep:recvAnySource";
    default: return nullptr;
  }
}

FutureWork::FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                       const std::vector<at::Tensor>* inputs)
    : c10d::Work(-1, type, profiler_name(type), inputs ? *inputs : outputs),
      outputs_(std::move(outputs)) {}

void FutureWork::check_process() const {
  if (owner_pid_ == current_pid()) return;
  const std::string owner = "process " + std::to_string(owner_pid_);
  throw TorchError(CommError("process " + std::to_string(current_pid()) + " is a fork of " + owner +
                             ", which made this " + c10d::opTypeToString(opType_) +
                             " call, and cannot wait for it: wait in " + owner));
}

bool FutureWork::isCompleted() {
  check_process();
  return c10d::Work::isCompleted();
}

bool FutureWork::complete(std::exception_ptr error) {
  bool has_callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return false;
    completed_ = true;
    exception_ = error;
    has_callbacks = future_ != nullptr;
  }
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  cv_.notify_all();
  return has_callbacks;
}

void FutureWork::run_callbacks() {
  if (exception_)
    future_->setErrorIfNeeded(exception_);
  else
    future_->markCompleted(value());
}

void FutureWork::wait_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
}

void FutureWork::sleep_until_completed(std::chrono::milliseconds timeout,
                                       const std::function<void()>& poll) {
  const bool is_unlimited = timeout <= std::chrono::milliseconds(0);
  const auto begun = Clock::now();
  {
    SleepScope scope;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!cv_.wait_for(lock, is_unlimited ? kSleepSlice : std::min(kSleepSlice, timeout),
                         [this] { return completed_; })) {
      lock.unlock();
      scope.begin();
      if (!is_unlimited && Clock::now() - begun > timeout)
        throw_unfinished(c10d::opTypeToString(opType_), timeout);
      poll();
      lock.lock();
    }
  }
  wait_future();
  if (exception_) std::rethrow_exception(exception_);
}

bool FutureWork::is_future_completed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !future_ || future_->completed();
}

// Returns the accelerators of tensors, which a future has to know.
static std::vector<c10::Device> find_devices(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const c10::Device device = tensor.device();
    if (!device.is_cpu() && std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  }
  return devices;
}

c10::intrusive_ptr<c10::ivalue::Future> FutureWork::getFuture() {
  check_process();
  bool is_done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(value().type(), find_devices(outputs_));
    is_done = completed_;
  }
  if (is_done) run_callbacks();
  return future_;
}

// ---- collective calls ----

class CollectiveWork::Execution : public QueuedCall {
 public:
  explicit Execution(CollectiveWork* work)
      : work_(c10::intrusive_ptr<CollectiveWork>::reclaim_copy(work)) {}
  Progress advance() override {
    if (!work_->advance_) return Progress::waiting;
    Progress progress = Progress::executed;
    try {
      progress = work_->advance_();
    } catch (...) {
      error_ = to_torch_error();
    }
    if (progress == Progress::executed) end();
    return progress;
  }
  void execute(bool background) override {
    try {
      at::NoGradGuard guard;
      work_->body_(background);
    } catch (...) {
      error_ = to_torch_error();
    }
    end();
  }
  bool is_executed() override { return executed_.load(std::memory_order_acquire); }
  bool complete() override {
    const bool has_callbacks = work_->complete(error_);
    if (!has_callbacks) work_ = nullptr;
    return has_callbacks;
  }
  void run_callbacks() override { std::exchange(work_, nullptr)->run_callbacks(); }

 private:
  void end() {
    work_->body_ = nullptr;
    work_->advance_ = nullptr;
    executed_.store(true, std::memory_order_release);
  }

  c10::intrusive_ptr<CollectiveWork> work_;  // until it is completed
  std::exception_ptr error_;
  std::atomic<bool> executed_{false};
};

CollectiveWork::CollectiveWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                               const std::vector<at::Tensor>* inputs,
                               std::shared_ptr<CallQueue> queue, std::function<void(bool)> body,
                               std::function<Progress()> advance)
    : FutureWork(type, std::move(outputs), inputs),
      queue_(std::move(queue)),
      body_(std::move(body)),
      advance_(std::move(advance)) {}

void CollectiveWork::start(bool is_async) {
  execution_ = std::make_shared<Execution>(this);
  if (is_async) {
    queue_->add(execution_, !advance_);
    return;
  }
  queue_->run(*execution_);
  if (auto error = exception()) std::rethrow_exception(error);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  if (timeout <= std::chrono::milliseconds(0)) queue_->help_until_executed(*execution_);
  sleep_until_completed(timeout, [this] { queue_->poll_signals(); });
  return true;
}

// ---- messages ----

class MessageWork::PostedMessage : public Message {
 public:
  bool complete() override {
    const bool has_callbacks = work->complete_message();
    if (!has_callbacks) work = nullptr;
    return has_callbacks;
  }
  void run_callbacks() override { std::exchange(work, nullptr)->run_callbacks(); }

  c10::intrusive_ptr<MessageWork> work;  // until it is completed
};

MessageWork::MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                         std::shared_ptr<PointToPoint> p2p, at::Tensor buffer,
                         std::optional<OutputTensor> output)
    : FutureWork(type, std::move(outputs)),
      p2p_(std::move(p2p)),
      message_(std::make_shared<PostedMessage>()),
      buffer_(std::move(buffer)),
      output_(std::move(output)) {}

void MessageWork::start(Op op, int peer, int64_t tag, std::chrono::milliseconds timeout) {
  message_->op = op;
  message_->peer = peer;
  message_->tag = tag;
  message_->timeout = timeout;
  message_->data = static_cast<char*>(buffer_.data_ptr());
  message_->bytes = buffer_.nbytes();
  message_->count = static_cast<uint64_t>(buffer_.numel());
  message_->dtype = static_cast<uint8_t>(buffer_.scalar_type());
  message_->work = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  p2p_->post(message_);
}

bool MessageWork::complete_message() {
  std::exception_ptr error;
  try {
    if (!message_->error.empty())
      throw CommError(message_->error, message_->failure, p2p_->describe(*message_));
    if (output_) {
      at::NoGradGuard guard;
      output_->copy_back();
    }
  } catch (...) {
    error = to_torch_error();
  }
  output_.reset();
  buffer_.reset();
  return complete(error);
}

bool MessageWork::isCompleted() {
  check_process();
  return p2p_->test(message_) && is_future_completed();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  if (!p2p_->wait(message_, timeout)) throw_unfinished(p2p_->describe_in_group(*message_), timeout);
  wait_future();
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

int MessageWork::sourceRank() const { return message_->source; }

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  auto future = FutureWork::getFuture();
  p2p_->progress_in_background(message_);
  return future;
}

// ---- coalesced calls ----

CompositeWork::CompositeWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
                             std::vector<std::vector<at::Tensor>> lists)
    : FutureWork(c10d::OpType::COALESCED, {}),
      works_(std::move(works)),
      lists_(std::move(lists)),
      remaining_(works_.size() + 1) {}  // one for `getFuture`

bool CompositeWork::isCompleted() {
  check_process();
  for (auto& work : works_)
    if (!work->isCompleted()) return false;
  return is_future_completed();
}

std::exception_ptr CompositeWork::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}

bool CompositeWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  const auto until = Clock::now() + timeout;
  std::exception_ptr first;
  for (auto& work : works_) {
    auto remaining = timeout;
    if (timeout > std::chrono::milliseconds(0))
      remaining =
          std::max(std::chrono::milliseconds(1),
                   std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()));
    try {
      work->wait(remaining);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  wait_future();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> CompositeWork::getFuture() {
  auto future = FutureWork::getFuture();
  if (has_callbacks_.exchange(true)) return future;
  auto self = c10::intrusive_ptr<CompositeWork>::reclaim_copy(this);
  for (auto& work : works_)
    work->getFuture()->addCallback([self](c10::ivalue::Future&) { self->count_completed(); });
  count_completed();
  return future;
}

void CompositeWork::count_completed() {
  if (remaining_.fetch_sub(1) == 1 && complete(exception())) run_callbacks();
}

}  // namespace lockstep
