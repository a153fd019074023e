// The Gloo group of the same ranks, for calls with tensors that shared memory does not carry.
//
//     all ranks     arrive in shared memory and compare their calls, as in any other call
//     first call    connect to each other, over the loopback interface
//     all ranks     Gloo's call
//     all ranks     meet in shared memory again
//
// A rank that died, did not arrive or made another call is found in shared memory, with the errors
// of any other call, and so is a rank that failed in Gloo: all ranks state one cause.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>

#include "collective_call.h"

namespace lockstep {

// Connects this rank to all others through a store; returns torch's ProcessGroupGloo. Throws
// CommError, or what a signal handler of Python raised.
using ConnectGloo =
    c10::intrusive_ptr<c10d::Backend> (*)(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, std::chrono::milliseconds timeout);

// The calls of a rank must not overlap: the caller holds a lock.
class GlooFallback {
 public:
  // Starts a call of Gloo.
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& gloo)>;

  GlooFallback(c10::intrusive_ptr<c10d::Store> store, ConnectGloo connect)
      : store_(std::move(store)), connect_(connect) {}
  // Makes a call of Gloo as the whole of `call`, and waits until it is complete on all ranks.
  void run(CollectiveCall& call, const Start& start, std::chrono::milliseconds timeout);

 private:
  std::string start_and_wait(CollectiveCall& call, const Start& start,
                             std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Backend> connect(CollectiveCall& call,
                                            std::chrono::milliseconds timeout);
  void close();

  c10::intrusive_ptr<c10d::Store> store_;
  ConnectGloo connect_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  // null before the first call, and after a failure
};

}  // namespace lockstep
