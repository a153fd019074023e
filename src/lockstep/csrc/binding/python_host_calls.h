// HostCalls by a Python object (lockstep/comm/hosts/backend.py), whose methods are called with the
// interpreter's lock. Its exceptions become CommError with their text.
#pragma once

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "activity.h"
#include "errors.h"
#include "hosts_backend.h"

namespace lockstep {

// A call, as Python sees it.
struct HostCallInfo {
  CallInfo info;
  uint64_t number;       // in the group, from 1
  double timeout;        // seconds
  unsigned long caller;  // the thread that made the call

  std::string op() const { return op_name(info.op); }
  std::string reduction() const {
    const bool reduces =
        info.op == Op::all_reduce || info.op == Op::reduce || info.op == Op::reduce_scatter;
    return reduces ? reduction_name(info.reduction) : "";
  }
  std::string dtype() const { return info.op == Op::barrier ? "" : dtype_name(info.dtype); }
};

inline std::string text_of(pybind11::error_already_set& error) {
  return pybind11::str(error.value());
}

template <typename... Arguments>
pybind11::object call_python(const pybind11::object& object, const char* method,
                             Arguments&&... arguments) {
  try {
    return object.attr(method)(std::forward<Arguments>(arguments)...);
  } catch (pybind11::error_already_set& error) {
    throw CommError(text_of(error));
  }
}

class PythonExecutor : public Executor {
 public:
  PythonExecutor(const pybind11::object& object, const HostCallInfo& info, int rank, int size,
                 const std::vector<int>& ranks, std::string name)
      : object_(object), info_(info), rank_(rank), size_(size), ranks_(ranks), name_(name) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string format_rank(int rank) const override {
    const auto index = static_cast<size_t>(rank);
    return "rank " + std::to_string(index < ranks_.size() ? ranks_[index] : rank);
  }
  std::string group_name() const override { return name_; }

  void barrier() override {
    pybind11::gil_scoped_acquire lock;
    call_python(object_, "barrier", info_);
  }
  void exchange(const ExchangeBlocks& blocks) override {
    pybind11::gil_scoped_acquire lock;
    call_python(object_, "exchange", info_, bytes_of(blocks.send), bytes_of(blocks.receive),
                blocks.is_same_to_all);
  }
  void all_reduce(void* data, size_t count, DataType, Reduction, int root) override {
    pybind11::gil_scoped_acquire lock;
    call_python(object_, "all_reduce", info_, tensor_of(data, count), root);
  }
  void reduce_scatter(const std::vector<Block>& send, char* result, size_t count, DataType,
                      Reduction) override {
    pybind11::gil_scoped_acquire lock;
    const at::Tensor output = tensor_of(result, count);
    Tensors inputs;
    for (const Block& block : send)
      inputs.push_back(tensor_of(block.data, block.bytes / output.element_size()));
    call_python(object_, "reduce_scatter", info_, inputs, output);
  }
  // Calls `function`, which adds the buckets of all ranks.
  void reproducible_all_reduce(const pybind11::object& function) {
    pybind11::gil_scoped_acquire lock;
    call_python(object_, "reproducible_all_reduce", info_, function);
  }

 private:
  static Tensors bytes_of(const std::vector<Block>& blocks) {
    Tensors tensors;
    for (const Block& block : blocks)
      tensors.push_back(at::from_blob(block.data, {static_cast<int64_t>(block.bytes)},
                                      at::TensorOptions().dtype(at::kByte)));
    return tensors;
  }
  at::Tensor tensor_of(void* data, size_t count) const {
    const auto dtype = static_cast<at::ScalarType>(info_.info.dtype);
    return at::from_blob(data, {static_cast<int64_t>(count)}, at::TensorOptions().dtype(dtype));
  }

  const pybind11::object& object_;
  const HostCallInfo& info_;
  const int rank_, size_;
  const std::vector<int>& ranks_;
  const std::string name_;
};

class PythonHostCalls : public HostCalls {
 public:
  PythonHostCalls(pybind11::object object, int rank, int size, std::string name,
                  std::vector<int> ranks, void (*poll_signals)())
      : object_(std::move(object)),
        rank_(rank),
        size_(size),
        name_(std::move(name)),
        ranks_(std::move(ranks)),
        poll_signals_(poll_signals) {}
  ~PythonHostCalls() override {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    pybind11::gil_scoped_acquire lock;
    object_ = pybind11::object();
  }

  void run(const CollectiveBackend::PreparedCall& call, std::chrono::milliseconds timeout,
           bool) override {
    const HostCallInfo info{call.info, ++calls_, static_cast<double>(timeout.count()) / 1000,
                            caller_};
    publish_call(op_name(call.info.op), -1, info.number, call.info.count, name_, Clock::now());
    PythonExecutor executor(object_, info, rank_, size_, ranks_, name_);
    call.body(executor);
  }

  WorkPtr post_message(c10d::OpType type, Tensors& tensors, int peer, int tag) override {
    pybind11::gil_scoped_acquire lock;
    if (type == c10d::OpType::SEND) return object_.attr("send")(tensors, peer, tag).cast<WorkPtr>();
    if (type == c10d::OpType::RECV) return object_.attr("recv")(tensors, peer, tag).cast<WorkPtr>();
    return object_.attr("recv_any")(tensors, tag).cast<WorkPtr>();
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    pybind11::gil_scoped_acquire lock;
    object_.attr("set_timeout")(static_cast<double>(timeout.count()) / 1000);
  }
  void set_name(const std::string& name) override {
    pybind11::gil_scoped_acquire lock;
    name_ = name;
    object_.attr("set_name")(name);
  }
  void note_caller(unsigned long thread) override { caller_ = thread; }
  void poll_signals() override {
    try {
      poll_signals_();
    } catch (pybind11::error_already_set&) {
      pybind11::gil_scoped_acquire lock;
      object_.attr("interrupt")();
      throw;
    }
  }
  std::string describe_caller() override {
    pybind11::gil_scoped_acquire lock;
    return pybind11::str(object_.attr("describe_caller")(caller_.load()));
  }
  bool is_aborted() override {
    pybind11::gil_scoped_acquire lock;
    return object_.attr("is_aborted")().cast<bool>();
  }
  void abort() override {
    pybind11::gil_scoped_acquire lock;
    object_.attr("abort")();
  }
  void shutdown() override {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire lock;
    object_.attr("shutdown")();
  }

  const pybind11::object& object() const { return object_; }

 private:
  pybind11::object object_;
  const int rank_, size_;
  std::string name_;
  const std::vector<int> ranks_;
  void (*const poll_signals_)();
  std::atomic<unsigned long> caller_{0};
  uint64_t calls_ = 0;  // one runs at a time
};

}  // namespace lockstep
