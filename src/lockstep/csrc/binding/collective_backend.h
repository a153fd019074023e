// The collective calls of a c10d backend: checks torch's arguments and hands each call to the core.
//
// There is one object per rank and group. Collective calls run one at a time through the
// CallQueue. LockstepBackend (backend.h), which derives from this class, joins the group and moves
// the data of messages.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "call_queue.h"
#include "collectives/exchange.h"
#include "process.h"
#include "tensors.h"
#include "work.h"

namespace lockstep {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CollectiveBackend : public c10d::Backend {
 public:
  using Body = std::function<void(CollectiveCall&)>;
  struct PreparedCall {
    CallInfo info;
    Body body;
  };
  // Runs a call. Works in progress share it, and may outlive the backend.
  class Runner {
   public:
    virtual ~Runner() = default;
    virtual void run(const PreparedCall& call, std::chrono::milliseconds timeout,
                     bool is_background) = 0;
  };

  CollectiveBackend(int rank, int size, std::chrono::milliseconds timeout, const std::string& name,
                    const std::vector<int>& ranks);

  // Returns the name of a group in messages: "default" for torch's own default group.
  static std::string shown_name(const std::string& name);
  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  // TORCH_DISTRIBUTED_DEBUG=DETAIL needs sequence numbers.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }

  // The index of the CPU is negative.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }
  // Returns a bucket of torch's DistributedDataParallel, which is real if `options` are complex.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Returns an uninitialized tensor in shared memory, for callers in Python.
  static at::Tensor allocate(int64_t size, at::ScalarType dtype);

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // torch itself calls more than the plain forms: its functional collectives the coalesced
  // ones only, FSDP2 the reductions AVG and PREMUL_SUM, torch.distributed.checkpoint gather
  // and scatter, DistributedDataParallel futures of a list of tensors.
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&,
                              const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&,
                         const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override;

  WorkPtr send(Tensors&, int, int) override;
  WorkPtr recv(Tensors&, int, int) override;
  WorkPtr recvAnysource(Tensors&, int) override;

 protected:
  // Starts the calls, one after the other, as one Work. `copied_back` lists the tensors that
  // are copied back afterwards; `inputs` those that are read, if they are not the outputs.
  WorkPtr start(c10d::OpType type, Tensors outputs, std::vector<PreparedCall> calls,
                std::chrono::milliseconds timeout, bool is_async,
                std::vector<OutputTensor> copied_back, const Tensors* inputs = nullptr);
  // Starts a call that is queued, and takes its steps in `advance`; `body` takes those that are
  // left.
  WorkPtr start_in_steps(Op op, Tensors outputs, std::function<void(bool)> body,
                         std::function<Progress()> advance);
  // Starts a message whose arguments were checked; `peer` is -1 if it may come from any rank.
  virtual WorkPtr start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) = 0;
  // Throws if the group cannot be used, such as in a forked process.
  void check_usable();
  // Throws in a process that was forked from the one that joined the group.
  void check_process() const;
  // Throws if the process refuses calls.
  virtual void check_permitted(Op op) = 0;
  virtual void note_caller(unsigned long thread) = 0;  // the thread that makes the next call
  virtual void set_name(const std::string& name) = 0;  // of the group, in messages

  // Every destructor of a derived class calls this: it shuts the group down. In a forked child
  // it returns false instead, and the derived class must `leak` its members. Leaving the group
  // there would tell the other ranks that this rank has left. Even destroying a condition
  // variable would block forever: it waits for the threads that slept on it at the fork, which
  // the child does not have.
  bool shut_down_unless_forked();
  // Never destroys the object behind `pointer`.
  template <typename T>
  static void leak(std::shared_ptr<T>& pointer) {
    (void)new std::shared_ptr<T>(std::move(pointer));
  }

  const int owner_pid_ = current_pid();
  std::string name_;  // of the group, in messages
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Runner> runner_;
  std::shared_ptr<CallQueue> queue_;  // null once the group is shut down
  std::atomic<uint64_t> calls_{0};

 private:
  WorkPtr post_message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  void add_to_coalesced(const WorkPtr& work);
  void check_root(const char* op, int root) const;
  WorkPtr allreduce_list(Tensors& tensors, const c10d::AllreduceOptions& opts);
  PreparedCall prepare_all_reduce(const at::Tensor& given, const c10d::ReduceOp& op, int root);
  PreparedCall prepare_exchange(CallInfo info, ExchangeBlocks blocks);
  PreparedCall prepare_all_gather(const OutputList& outputs, const at::Tensor& input,
                                  std::vector<Block> receive);
  PreparedCall prepare_reduce_scatter(const char* op, Tensors inputs, const at::Tensor& given,
                                      const c10d::ReduceOp& reduction, bool uneven);

  bool is_coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace lockstep
