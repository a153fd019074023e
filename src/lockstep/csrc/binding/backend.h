// The c10d backend "lockstep" of ranks on one host: translates torch's calls for the core.
//
// Its collective calls are those of CollectiveBackend, executed in shared memory, or by Gloo if
// their tensors are not carried there (FallbackBackend); messages go through PointToPoint.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/all_gather_bytes.h"
#include "collectives/reproducible_all_reduce.h"
#include "fallback_backend.h"
#include "point_to_point.h"

namespace lockstep {

// Returns where a thread of this process is in its own code, or "" if unknown.
using LocateThread = std::string (*)(unsigned long thread);
// Lets Python handle signals; throws what a handler raised.
using PollSignals = void (*)();

// Lets collective calls and messages of this process throw ArgumentError with this reason; ""
// permits them again.
void set_refusal(const std::string& reason);

class LockstepBackend : public FallbackBackend {
 public:
  struct Core;  // shared with works in progress, which may outlive this object

  // Joins the group through the store. Blocks until all ranks have joined.
  LockstepBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                  std::chrono::milliseconds timeout, std::string name, std::vector<int> ranks,
                  LocateThread locate, PollSignals poll_signals, ConnectGloo connect_gloo);
  ~LockstepBackend() override;

  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // Aborts the group for all ranks, which then throw errors with this failure.
  void abort_because(const Failure& failure);

  // Not in c10d: see collectives/reproducible_all_reduce.h. `present` receives one byte per member,
  // 1 if the member is new. `own` may hold the values of this rank's first node. `in_steps`: it is
  // executed by `advance`, or when it is waited for, not by another thread.
  WorkPtr reproducible_all_reduce(Bucket bucket, at::Tensor packed, at::Tensor result,
                                  at::Tensor present, std::optional<at::Tensor> own, bool in_steps);
  // Not in c10d: see collectives/all_gather_bytes.h.
  std::vector<std::string> all_gather_bytes(std::string message);
  size_t longest_message();
  // Takes steps of calls that are executed in steps, as far as they need not wait.
  void advance();
  // Not in c10d: returns the same memory on every rank, as bytes. See collectives/share.h.
  at::Tensor share(int64_t bytes);

 private:
  static std::unique_ptr<Group> join(c10d::Store& store, int rank, int size,
                                     std::chrono::milliseconds timeout, const GroupInfo& info);
  WorkPtr start_message(c10d::OpType type, Tensors& tensors, int peer, int tag) override;
  void check_permitted(Op op) override;
  void note_caller(unsigned long thread) override;
  void set_name(const std::string& name) override;

  std::shared_ptr<Core> core_;
  std::shared_ptr<PointToPoint> p2p_;
};

}  // namespace lockstep
