// The c10d backend "lockstep": torch's calls, translated for the core.
//
// One object a rank and group. Collectives run one after the other through the
// queue; messages through the mail. Joining is below; the calls are in calls.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/exact_sum.h"
#include "mail.h"
#include "process.h"
#include "queue.h"
#include "tensors.h"
#include "work.h"

namespace lockstep {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// How this process says where a thread is in its own code; "" where it can't.
using Where = std::string (*)(unsigned long thread);
using Hear = void (*)();  // lets Python handle signals; throws what a handler raised

class LockstepBackend : public c10d::Backend {
 public:
  // Joins the group through the store; blocks until all ranks are there.
  LockstepBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, std::string name, std::vector<int> ranks,
                  Where where, Hear hear);
  ~LockstepBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

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

  // Beside c10d's calls: see collectives/exact_sum.h. `present` gets one byte a member.
  // `own` may hold the first node's values, of which this rank's slice is then read.
  WorkPtr exact_sum(ExactBucket bucket, at::Tensor packed, at::Tensor result, at::Tensor present,
                    std::optional<at::Tensor> own);
  // The same memory on every rank of the group, as bytes: see collectives/share.h.
  at::Tensor share(int64_t bytes);

 private:
  struct Inside;  // what outlives this object in works that are under way
  using Body = std::function<void(Turn&)>;
  struct Plan {   // one turn of a call
    Call call;
    Body body;
  };

  static std::unique_ptr<Group> join(c10d::Store& store, int rank, int size,
                                     std::chrono::milliseconds timeout, const Naming& naming);
  WorkPtr start(c10d::OpType type, Tensors outputs, std::vector<Plan> plans,
                std::chrono::milliseconds timeout, bool asynchronous,
                std::vector<Writable> written);
  void coalesce(const WorkPtr& work);
  WorkPtr message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  // Throws in a process that was forked from the one that joined the group.
  void check_process() const;
  void check_open();
  void take_name();
  void check_root(const char* op, int root) const;
  Plan all_reduce_plan(const at::Tensor& tensor, const c10d::ReduceOp& op, int root);
  Plan exchange_plan(Call call, Exchange blocks);
  Plan all_gather_plan(const Outputs& outputs, const at::Tensor& input, std::vector<Block> into);
  Plan reduce_scatter_plan(const char* op, Tensors inputs, const at::Tensor& output,
                           const c10d::ReduceOp& reduction, bool uneven);

  const int process_ = this_process();  // which joined the group
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Inside> inside_;
  std::shared_ptr<Queue> queue_;
  std::shared_ptr<Mail> mail_;
  std::atomic<uint64_t> calls_{0};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace lockstep
