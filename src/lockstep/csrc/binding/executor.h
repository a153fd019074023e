// What executes the collective calls of a group, once their arguments have been checked.
//
// All calls of torch come down to four operations on plain memory. A group on one host runs
// them in shared memory (NativeExecutor); a group across hosts has its own executor
// (hosts_backend.h).
#pragma once

#include <string>
#include <vector>

#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exchange.h"
#include "collectives/reduce_scatter.h"

namespace lockstep {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string format_rank(int rank) const = 0;  // "rank 3"
  virtual std::string group_name() const = 0;

  virtual void barrier() = 0;
  virtual void exchange(const ExchangeBlocks& blocks) = 0;
  // Writes the result to `data` of rank `root`, or of every rank if `root` is -1.
  virtual void all_reduce(void* data, size_t count, DataType type, Reduction reduction,
                          int root) = 0;
  virtual void reduce_scatter(const std::vector<Block>& send, char* result, size_t count,
                              DataType type, Reduction reduction) = 0;
};

class NativeExecutor : public Executor {
 public:
  explicit NativeExecutor(CollectiveCall& call) : call_(call) {}
  CollectiveCall& call() { return call_; }
  int rank() const override { return call_.rank(); }
  int size() const override { return call_.size(); }
  std::string format_rank(int rank) const override { return call_.group().format_rank(rank); }
  std::string group_name() const override { return call_.group().info().name; }
  void barrier() override { lockstep::barrier(call_); }
  void exchange(const ExchangeBlocks& blocks) override { lockstep::exchange(call_, blocks); }
  void all_reduce(void* data, size_t count, DataType type, Reduction reduction, int root) override {
    lockstep::all_reduce(call_, data, count, type, reduction, root);
  }
  void reduce_scatter(const std::vector<Block>& send, char* result, size_t count, DataType type,
                      Reduction reduction) override {
    lockstep::reduce_scatter(call_, send, result, count, type, reduction);
  }

 private:
  CollectiveCall& call_;
};

}  // namespace lockstep
