// The c10d backend "lockstep": translates torch's calls for the core.
//
// There is one object per rank and group. Collective calls run one at a time through the
// CallQueue, messages through PointToPoint. Joining the group and messages are in
// backend.cpp, collective calls in backend_collectives.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call_queue.h"
#include "collectives/exact_sum.h"
#include "point_to_point.h"
#include "process.h"
#include "tensors.h"
#include "work.h"

namespace lockstep {

// A BufferHandle as numbers that can be sent to other ranks: process, descriptor, bytes and
// nonce (two) of the segment, and the offset.
using PackedHandle = std::array<int64_t, 6>;

// Returns the handle of a tensor; throws ArgumentError if it is in private memory.
PackedHandle handle_of(const at::Tensor& tensor);

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Returns where a thread of this process is in its own code, or "" if unknown.
using LocateThread = std::string (*)(unsigned long thread);
// Lets Python handle signals; throws what a handler raised.
using PollSignals = void (*)();

// Lets collective calls and messages of this process throw ArgumentError with this reason; ""
// permits them again.
void set_refusal(const std::string& reason);

class LockstepBackend : public c10d::Backend {
 public:
  // Joins the group through the store. Blocks until all ranks have joined.
  LockstepBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, std::string name, std::vector<int> ranks,
                  LocateThread locate, PollSignals poll_signals);
  ~LockstepBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  // TORCH_DISTRIBUTED_DEBUG=DETAIL needs sequence numbers.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // torch itself calls more than the plain forms: its functional collectives the coalesced
  // ones only, FSDP2 the reductions AVG and PREMUL_SUM, torch.distributed.checkpoint gather
  // and scatter, DistributedDataParallel futures of a list of tensors.
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
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

  // Not in c10d: see collectives/exact_sum.h. `present` receives one byte per member, 1 if
  // the member is new. `own` may hold the values of this rank's first node.
  WorkPtr exact_sum(ExactBucket bucket, at::Tensor packed, at::Tensor result, at::Tensor present,
                    std::optional<at::Tensor> own);
  // Not in c10d: returns the same memory on every rank, as bytes. See collectives/share.h.
  at::Tensor share(int64_t bytes);
  // Not in c10d: returns memory of another rank, as bytes. Not a collective call; the owner may
  // have died if a collective call has read the memory before.
  at::Tensor map_peer(const PackedHandle& handle, int64_t bytes);

 private:
  struct Core;  // shared with works in progress, which may outlive this object
  using Body = std::function<void(CollectiveCall&)>;
  struct PreparedCall {
    CallInfo info;
    Body body;
  };

  static std::unique_ptr<Group> join(c10d::Store& store, int rank, int size,
                                     std::chrono::milliseconds timeout, const GroupInfo& info);
  // Starts the calls, one after the other, as one Work. `copied_back` lists the tensors that
  // are copied back afterwards; `inputs` those that are read, if they are not the outputs.
  WorkPtr start(c10d::OpType type, Tensors outputs, std::vector<PreparedCall> calls,
                std::chrono::milliseconds timeout, bool is_async,
                std::vector<OutputTensor> copied_back, const Tensors* inputs = nullptr);
  void add_to_coalesced(const WorkPtr& work);
  WorkPtr post_message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  // Throws in a process that was forked from the one that joined the group.
  void check_process() const;
  void check_usable();
  void check_permitted(Op op);
  void adopt_group_name();
  void check_root(const char* op, int root) const;
  WorkPtr allreduce_list(Tensors& tensors, const c10d::AllreduceOptions& opts);
  PreparedCall prepare_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
  PreparedCall prepare_exchange(CallInfo info, ExchangeBlocks blocks);
  PreparedCall prepare_all_gather(const OutputList& outputs, const at::Tensor& input,
                                  std::vector<Block> receive);
  PreparedCall prepare_reduce_scatter(const char* op, Tensors inputs, const at::Tensor& output,
                                      const c10d::ReduceOp& reduction, bool uneven);

  const int owner_pid_ = current_pid();
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Core> core_;
  std::shared_ptr<CallQueue> queue_;
  std::shared_ptr<PointToPoint> p2p_;
  std::atomic<uint64_t> calls_{0};
  bool is_coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace lockstep
