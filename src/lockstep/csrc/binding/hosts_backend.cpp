#include "hosts_backend.h"

#include <ATen/core/grad_mode.h>

#include "activity.h"
#include "backend.h"
#include "errors.h"
#include "torch_errors.h"

namespace lockstep {

HostsBackend::HostsBackend(int rank, int size, std::chrono::milliseconds timeout,
                           const std::string& name, const std::vector<int>& ranks,
                           std::shared_ptr<HostCalls> calls)
    : CollectiveBackend(rank, size, timeout, name, ranks), host_calls_(std::move(calls)) {
  runner_ = host_calls_;
  queue_ = std::make_shared<CallQueue>([calls = host_calls_] { calls->poll_signals(); });
  runs_in_caller_ = false;
}

HostsBackend::~HostsBackend() {
  if (!shut_down_unless_forked()) leak(host_calls_);
}

void HostsBackend::shutdown() {
  if (!host_calls_) return;
  check_process();
  queue_->stop();
  host_calls_->shutdown();
  queue_.reset();
  runner_.reset();
  host_calls_.reset();
}

void HostsBackend::setTimeout(std::chrono::milliseconds timeout) {
  CollectiveBackend::setTimeout(timeout);
  if (host_calls_) host_calls_->set_timeout(timeout);
}

void HostsBackend::abort() {
  if (!host_calls_) return;
  check_process();
  host_calls_->abort();
}

c10d::ErrorType HostsBackend::getError() {
  if (!host_calls_) return c10d::ErrorType::SUCCESS;
  check_process();
  return host_calls_->is_aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void HostsBackend::check_permitted(Op op) {
  const std::string* reason = current_refusal();
  CHECK_ARGUMENT(!reason, host_calls_->describe_caller(), ": ", op_name(op),
                 " is refused: ", *reason);
}

WorkPtr HostsBackend::start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  return host_calls_->post_message(type, tensors, peer, tag);
}

WorkPtr HostsBackend::reproducible_all_reduce(const at::Tensor& result, Body body) {
  check_tensor("reproducible_all_reduce", result);
  CallInfo info;
  info.op = Op::reproducible_all_reduce;
  info.dtype = static_cast<uint8_t>(result.scalar_type());
  info.root = -1;
  info.count = static_cast<uint64_t>(result.numel());
  return start(c10d::OpType::UNKNOWN, {result}, {{info, std::move(body)}},
               std::chrono::milliseconds(0), true, {});
}

// ---- messages between hosts ----

HostMessageWork::HostMessageWork(c10d::OpType type, const at::Tensor& tensor,
                                 std::chrono::milliseconds timeout,
                                 std::function<void()> poll_signals,
                                 std::function<void()> fail_late,
                                 std::shared_ptr<CallbackPool> callbacks)
    : FutureWork(type, {tensor}),
      timeout_(timeout),
      poll_signals_(std::move(poll_signals)),
      fail_late_(std::move(fail_late)),
      callbacks_(std::move(callbacks)) {
  at::NoGradGuard guard;
  if (type == c10d::OpType::SEND) {
    buffer_ = as_input("send", tensor);
  } else {
    output_.emplace("recv", tensor, false);
    buffer_ = output_->plain();
  }
}

void HostMessageWork::finish(int source, const std::string& error) {
  if (is_finished_.exchange(true)) return;
  source_ = source;
  std::exception_ptr thrown;
  try {
    if (!error.empty()) throw CommError(error);
    at::NoGradGuard guard;
    if (output_) output_->copy_back();
  } catch (...) {
    thrown = to_torch_error();
  }
  auto self = c10::intrusive_ptr<HostMessageWork>::reclaim_copy(this);
  if (complete(thrown)) callbacks_->submit([self] { self->run_callbacks(); });
}

bool HostMessageWork::isCompleted() { return FutureWork::isCompleted() && is_future_completed(); }

bool HostMessageWork::wait(std::chrono::milliseconds timeout) {
  check_process();
  sleep_until_completed(timeout, [this](Clock::duration waited) {
    poll_signals_();
    if (waited > timeout_) fail_late_();
  });
  return true;
}

}  // namespace lockstep
