#include "work.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

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

FutureWork::FutureWork(c10d::OpType type, std::vector<at::Tensor> outputs)
    : c10d::Work(-1, type), outputs_(std::move(outputs)) {}

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
    future_->markCompleted(c10::IValue(outputs_));
}

void FutureWork::complete(std::exception_ptr error) {
  if (settle(error)) announce();
}

c10::intrusive_ptr<c10::ivalue::Future> FutureWork::getFuture() {
  bool over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
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
  if (timeout > std::chrono::milliseconds(0)) {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(cv_.wait_for(lock, timeout, [this] { return completed_; }),
                "a call was not finished after ", timeout.count(), " ms; it goes on");
  } else {
    queue_->help(*run_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!cv_.wait_for(lock, kSlice, [this] { return completed_; })) {
      lock.unlock();
      queue_->hear();
      lock.lock();
    }
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

// ---- messages ----

MessageWork::MessageWork(c10d::OpType type, std::vector<at::Tensor> outputs,
                         std::shared_ptr<Mail> mail, Post message, at::Tensor kept,
                         std::function<void()> after)
    : FutureWork(type, std::move(outputs)),
      mail_(std::move(mail)),
      message_(std::move(message)),
      kept_(std::move(kept)),
      after_(std::move(after)) {}

void MessageWork::conclude() {
  std::lock_guard<std::mutex> lock(concluding_);
  if (concluded_) return;
  std::exception_ptr error;
  try {
    if (!message_->error.empty())
      mail_->wait(message_, std::chrono::milliseconds(1));  // throws the whole sentence
    if (after_) {
      at::NoGradGuard guard;
      after_();
    }
  } catch (...) {
    error = as_torch_error();
  }
  after_ = nullptr;
  concluded_ = true;
  complete(error);
}

bool MessageWork::isCompleted() {
  if (!mail_->test(message_)) return false;
  conclude();
  return true;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  if (!message_->done) {
    try {
      mail_->wait(message_,
                  timeout > std::chrono::milliseconds(0) ? timeout : message_->timeout);
    } catch (...) {
      std::rethrow_exception(as_torch_error());
    }
  }
  conclude();
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  auto future = FutureWork::getFuture();
  if (notified_.exchange(true)) return future;
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  mail_->notify(message_, [self] { self->conclude(); });
  return future;
}

// ---- several ----

ManyWork::ManyWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool ManyWork::isCompleted() {
  for (auto& work : works_)
    if (!work->isCompleted()) return false;
  return true;
}

bool ManyWork::wait(std::chrono::milliseconds timeout) {
  for (auto& work : works_) work->wait(timeout);
  return true;
}

}  // namespace lockstep
