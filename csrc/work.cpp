#include "work.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "failure.h"

namespace lockstep {

std::exception_ptr as_torch_error() {
  try {
    throw;
  } catch (const Failure& error) {
    try {
      C10_THROW_ERROR(DistBackendError, error.what());
    } catch (...) {
      return std::current_exception();
    }
  } catch (const Misuse& error) {
    try {
      C10_THROW_ERROR(ValueError, error.what());
    } catch (...) {
      return std::current_exception();
    }
  } catch (...) {
    return std::current_exception();
  }
}

[[noreturn]] static void unfinished(const std::string& what, std::chrono::milliseconds timeout) {
  C10_THROW_ERROR(DistBackendError,
                  what + " was not finished after " + seconds(timeout) + "; it goes on");
}

FutureWork::FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs)
    : c10d::Work(-1, type), outputs_(std::move(outputs)) {}

void FutureWork::check_process() const {
  if (process_ == this_process()) return;
  C10_THROW_ERROR(DistBackendError,
                  "process " + std::to_string(this_process()) + " is a fork of process " +
                      std::to_string(process_) + ", which made this " +
                      c10d::opTypeToString(opType_) + " call, and cannot wait for it: wait in "
                      "process " + std::to_string(process_));
}

bool FutureWork::isCompleted() {
  check_process();
  return c10d::Work::isCompleted();
}

bool FutureWork::settle(std::exception_ptr error) {
  bool heard;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (completed_) return false;
    completed_ = true;
    exception_ = error;
    heard = future_ != nullptr;
  }
  cv_.notify_all();
  return heard;
}

void FutureWork::announce() {
  if (exception_)
    future_->setErrorIfNeeded(exception_);
  else
    future_->markCompleted(value());
}

void FutureWork::await_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    future = future_;
  }
  if (future) future->wait();
}

bool FutureWork::has_told() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !future_ || future_->completed();
}

c10::intrusive_ptr<c10::ivalue::Future> FutureWork::getFuture() {
  check_process();
  bool over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(value().type());
    over = completed_;
  }
  if (over) announce();
  return future_;
}

// ---- collectives ----

class CollectiveWork::Run : public Job {
 public:
  explicit Run(CollectiveWork* work)
      : work_(c10::intrusive_ptr<CollectiveWork>::reclaim_copy(work)) {}
  void execute(bool background) override {
    try {
      at::NoGradGuard guard;
      work_->body_(background);
    } catch (...) {
      error_ = as_torch_error();
    }
    work_->body_ = nullptr;
    over_.store(true, std::memory_order_release);
  }
  bool over() override { return over_.load(std::memory_order_acquire); }
  bool settle() override {
    const bool heard = work_->settle(error_);
    if (!heard) work_ = nullptr;
    return heard;
  }
  void announce() override { std::exchange(work_, nullptr)->announce(); }

 private:
  c10::intrusive_ptr<CollectiveWork> work_;  // until it is concluded
  std::exception_ptr error_;
  std::atomic<bool> over_{false};
};

CollectiveWork::CollectiveWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                               std::shared_ptr<Queue> queue, std::function<void(bool)> body)
    : FutureWork(type, std::move(outputs)), queue_(std::move(queue)), body_(std::move(body)) {}

void CollectiveWork::start(bool asynchronous) {
  run_ = std::make_shared<Run>(this);
  if (asynchronous) {
    queue_->add(run_);
    return;
  }
  queue_->run(*run_);
  if (auto error = exception()) std::rethrow_exception(error);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  const bool patient = timeout <= std::chrono::milliseconds(0);
  if (patient) queue_->help(*run_);
  const auto begun = Clock::now();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!cv_.wait_for(lock, patient ? kSlice : std::min(kSlice, timeout),
                         [this] { return completed_; })) {
      lock.unlock();
      queue_->hear();
      if (!patient && Clock::now() - begun > timeout)
        unfinished(c10d::opTypeToString(opType_), timeout);
      lock.lock();
    }
  }
  await_future();
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

// ---- messages ----

class MessageWork::Held : public Message {
 public:
  bool settle() override {
    const bool heard = work->conclude();
    if (!heard) work = nullptr;
    return heard;
  }
  void announce() override { std::exchange(work, nullptr)->announce(); }

  c10::intrusive_ptr<MessageWork> work;  // until it is concluded
};

MessageWork::MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                         std::shared_ptr<Mail> mail, at::Tensor kept,
                         std::optional<Writable> written)
    : FutureWork(type, std::move(outputs)),
      mail_(std::move(mail)),
      message_(std::make_shared<Held>()),
      kept_(std::move(kept)),
      written_(std::move(written)) {}

void MessageWork::start(Op op, int peer, int64_t tag, std::chrono::milliseconds timeout) {
  message_->op = op;
  message_->peer = peer;
  message_->tag = tag;
  message_->timeout = timeout;
  message_->data = static_cast<char*>(kept_.data_ptr());
  message_->bytes = kept_.nbytes();
  message_->count = static_cast<uint64_t>(kept_.numel());
  message_->dtype = static_cast<uint8_t>(kept_.scalar_type());
  message_->work = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  mail_->post(message_);
}

bool MessageWork::conclude() {
  std::exception_ptr error;
  try {
    if (!message_->error.empty()) throw Failure(message_->error);
    if (written_) {
      at::NoGradGuard guard;
      written_->settle();
    }
  } catch (...) {
    error = as_torch_error();
  }
  written_.reset();
  kept_.reset();
  return settle(error);
}

bool MessageWork::isCompleted() {
  check_process();
  return mail_->test(message_) && has_told();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  if (!mail_->wait(message_, timeout))
    unfinished(mail_->titled(*message_), timeout);
  await_future();
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

int MessageWork::sourceRank() const { return message_->source; }

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  auto future = FutureWork::getFuture();
  mail_->listen(message_);
  return future;
}

// ---- several ----

ManyWork::ManyWork(std::vector<c10::intrusive_ptr<c10d::Work>> works,
                   std::vector<std::vector<at::Tensor>> lists)
    : FutureWork(c10d::OpType::COALESCED, {}),
      works_(std::move(works)),
      lists_(std::move(lists)),
      left_(works_.size() + 1) {}  // one for who asks

bool ManyWork::isCompleted() {
  check_process();
  for (auto& work : works_)
    if (!work->isCompleted()) return false;
  return has_told();
}

std::exception_ptr ManyWork::exception() const {
  for (const auto& work : works_)
    if (auto error = work->exception()) return error;
  return nullptr;
}

bool ManyWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  const auto until = Clock::now() + timeout;
  std::exception_ptr first;
  for (auto& work : works_) {
    auto left = timeout;
    if (timeout > std::chrono::milliseconds(0))
      left = std::max(std::chrono::milliseconds(1),
                      std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()));
    try {
      work->wait(left);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  await_future();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ManyWork::getFuture() {
  auto future = FutureWork::getFuture();
  if (asked_.exchange(true)) return future;
  auto self = c10::intrusive_ptr<ManyWork>::reclaim_copy(this);
  for (auto& work : works_)
    work->getFuture()->addCallback([self](c10::ivalue::Future&) { self->count(); });
  count();
  return future;
}

void ManyWork::count() {
  if (left_.fetch_sub(1) == 1 && settle(exception())) announce();
}

}  // namespace lockstep
