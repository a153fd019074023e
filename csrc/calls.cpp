// torch's collective calls: arguments checked here, then handed to the core.
// Those in which every rank gets another part are in calls_parts.cpp.
#include "calls.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exchange.h"

namespace lockstep {
LockstepBackend::Plan LockstepBackend::exchange_plan(Call call, Exchange blocks) {
  call.uneven = 1;
  return {call, [blocks = std::move(blocks)](Turn& turn) { exchange(turn, blocks); }};
}

// ---- all to all alike ----

LockstepBackend::Plan LockstepBackend::all_reduce_plan(const at::Tensor& tensor,
                                                       const c10d::ReduceOp& op, int root) {
  Call call = call_of(root < 0 ? Op::all_reduce : Op::reduce, tensor, root);
  set_reduction(call, op_name(call.op), tensor, op);
  const Type type = type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(call.reduction);
  return {call, [tensor, type, reduction, root](Turn& turn) {
            all_reduce(turn, tensor.data_ptr(), static_cast<size_t>(tensor.numel()), type,
                       reduction, root);
          }};
}

WorkPtr LockstepBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  Writable tensor("all_reduce", only("all_reduce", tensors), true);
  return start(c10d::OpType::ALLREDUCE, tensors,
               {all_reduce_plan(tensor.plain(), opts.reduceOp, -1)}, opts.timeout, opts.asyncOp,
               {tensor});
}

WorkPtr LockstepBackend::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Plan> plans;
  std::vector<Writable> written;
  for (const at::Tensor& each : tensors) {
    written.emplace_back("all_reduce_coalesced", each, true);
    plans.push_back(all_reduce_plan(written.back().plain(), opts.reduceOp, -1));
  }
  return start(c10d::OpType::ALLREDUCE_COALESCED, tensors, std::move(plans), opts.timeout,
               opts.asyncOp, std::move(written));
}

WorkPtr LockstepBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("reduce", root);
  const at::Tensor& given = only("reduce", tensors);
  if (root != rank_)
    return start(c10d::OpType::REDUCE, tensors,
                 {all_reduce_plan(readable("reduce", given), opts.reduceOp, root)}, opts.timeout,
                 opts.asyncOp, {});
  Writable tensor("reduce", given, true);
  return start(c10d::OpType::REDUCE, tensors,
               {all_reduce_plan(tensor.plain(), opts.reduceOp, root)}, opts.timeout, opts.asyncOp,
               {tensor});
}

WorkPtr LockstepBackend::barrier(const c10d::BarrierOptions& opts) {
  Call call;
  call.op = Op::barrier;
  return start(c10d::OpType::BARRIER, {}, {{call, [](Turn& turn) { lockstep::barrier(turn); }}},
               opts.timeout, opts.asyncOp, {});
}

void LockstepBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  // Every barrier of this backend names who is missing.
  c10d::BarrierOptions waited = opts;
  waited.asyncOp = false;
  barrier(waited)->wait();
}

// ---- one to all, all to one ----

WorkPtr LockstepBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("broadcast", root);
  const at::Tensor& given = only("broadcast", tensors);
  Exchange blocks{none(size_), none(size_), true};
  std::vector<Writable> written;
  at::Tensor kept;
  if (rank_ == root) {
    kept = readable("broadcast", given);
    for (int d = 0; d < size_; ++d)
      if (d != root) blocks.send[d] = block_of(kept);
  } else {
    written.emplace_back("broadcast", given, false);
    kept = written[0].plain();
    blocks.receive[root] = block_of(kept);
  }
  Plan plan = exchange_plan(call_of(Op::broadcast, given, root), std::move(blocks));
  plan.body = holding({kept}, std::move(plan.body));
  return start(c10d::OpType::BROADCAST, tensors, {std::move(plan)}, opts.timeout, opts.asyncOp,
               std::move(written));
}

WorkPtr LockstepBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("gather", root);
  const at::Tensor input = readable("gather", only("gather", inputs));
  Exchange blocks{none(size_), none(size_), true};
  blocks.send[root] = block_of(input);
  std::vector<Writable> written;
  if (rank_ == root) {
    const Tensors& list = only("gather", outputs);
    check_list("gather", list, input, size_);
    for (int s = 0; s < size_; ++s) {
      written.emplace_back("gather", list[s], false);
      blocks.receive[s] = block_of(written.back().plain());
    }
  }
  Plan plan = exchange_plan(call_of(Op::gather, input, root), std::move(blocks));
  plan.body = holding({input}, std::move(plan.body));
  return start(c10d::OpType::GATHER, rank_ == root ? outputs[0] : Tensors{}, {std::move(plan)},
               opts.timeout, opts.asyncOp, std::move(written));
}

WorkPtr LockstepBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("scatter", root);
  Writable output("scatter", only("scatter", outputs), false);
  Exchange blocks{none(size_), none(size_), false};
  blocks.receive[root] = block_of(output.plain());
  Tensors kept;
  if (rank_ == root) {
    const Tensors& list = only("scatter", inputs);
    check_list("scatter", list, output.plain(), size_);
    for (int d = 0; d < size_; ++d) {
      kept.push_back(readable("scatter", list[d]));
      blocks.send[d] = block_of(kept.back());
    }
  }
  Plan plan = exchange_plan(call_of(Op::scatter, output.plain(), root), std::move(blocks));
  plan.body = holding(std::move(kept), std::move(plan.body));
  return start(c10d::OpType::SCATTER, outputs, {std::move(plan)}, opts.timeout, opts.asyncOp,
               {output});
}

// ---- all-gather ----

WorkPtr LockstepBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  const at::Tensor input = readable("all_gather", only("all_gather", inputs));
  const Tensors& list = only("all_gather", outputs);
  check_list("all_gather", list, input, size_);
  Exchange blocks{none(size_), none(size_), true};
  std::vector<Writable> written;
  for (int r = 0; r < size_; ++r) {
    blocks.send[r] = block_of(input);
    written.emplace_back("all_gather", list[r], false);
    blocks.receive[r] = block_of(written.back().plain());
  }
  Plan plan = exchange_plan(call_of(Op::all_gather, input), std::move(blocks));
  plan.body = holding({input}, std::move(plan.body));
  return start(c10d::OpType::ALLGATHER, list, {std::move(plan)}, opts.timeout, opts.asyncOp,
               std::move(written));
}

LockstepBackend::Plan LockstepBackend::gather_plan(const at::Tensor& output,
                                                   const at::Tensor& input) {
  const char* op = "all_gather_into_tensor";
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, ": the tensors are ",
                    dtype_name(static_cast<int>(output.scalar_type())), " and ",
                    dtype_name(static_cast<int>(input.scalar_type())));
  TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, op, ": the output has ",
                    output.numel(), " elements, ", size_, " ranks give ", input.numel(), " each");
  Exchange blocks{none(size_), none(size_), true};
  char* to = static_cast<char*>(output.data_ptr());
  for (int r = 0; r < size_; ++r) {
    blocks.send[r] = block_of(input);
    blocks.receive[r] = {to + r * input.nbytes(), input.nbytes()};
  }
  Plan plan = exchange_plan(call_of(Op::all_gather, input), std::move(blocks));
  plan.body = holding({input, output}, std::move(plan.body));
  return plan;
}

WorkPtr LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  Writable written("all_gather_into_tensor", output, false);
  Plan plan = gather_plan(written.plain(), readable("all_gather_into_tensor", input));
  return start(c10d::OpType::_ALLGATHER_BASE, {output}, {std::move(plan)}, opts.timeout,
               opts.asyncOp, {written});
}

WorkPtr LockstepBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced: ",
                    outputs.size(), " outputs for ", inputs.size(), " inputs");
  std::vector<Plan> plans;
  std::vector<Writable> written;
  for (size_t i = 0; i < inputs.size(); ++i) {
    written.emplace_back("all_gather_into_tensor_coalesced", outputs[i], false);
    plans.push_back(gather_plan(written.back().plain(),
                                readable("all_gather_into_tensor_coalesced", inputs[i])));
  }
  return start(c10d::OpType::COALESCED, outputs, std::move(plans), opts.timeout, opts.asyncOp,
               std::move(written));
}

WorkPtr LockstepBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors input{inputs[i]};
    // outputs[rank][i] is the i-th tensor of that rank.
    std::vector<Tensors> lists(1);
    for (Tensors& rank : outputs) lists[0].push_back(rank.at(i));
    works.push_back(allgather(lists, input, opts));
  }
  return c10::make_intrusive<ManyWork>(std::move(works), outputs);
}

}  // namespace lockstep
