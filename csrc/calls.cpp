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
  Outputs outputs("all_reduce_coalesced");
  for (const at::Tensor& each : tensors)
    plans.push_back(all_reduce_plan(outputs.add(each, true), opts.reduceOp, -1));
  return start(c10d::OpType::ALLREDUCE_COALESCED, tensors, std::move(plans), opts.timeout,
               opts.asyncOp, outputs.take());
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
  const at::Tensor& given = only("gather", inputs);
  Exchange blocks{none(size_), none(size_), true};
  Outputs written("gather");
  if (rank_ == root) {
    const Tensors& list = only("gather", outputs);
    check_list("gather", list, given, size_);
    for (int s = 0; s < size_; ++s) blocks.receive[s] = block_of(written.add(list[s], false));
  }
  const at::Tensor input = written.readable(given, blocks.receive[root]);
  blocks.send[root] = block_of(input);
  Plan plan = exchange_plan(call_of(Op::gather, input, root), std::move(blocks));
  plan.body = holding({input}, std::move(plan.body));
  return start(c10d::OpType::GATHER, rank_ == root ? outputs[0] : Tensors{}, {std::move(plan)},
               opts.timeout, opts.asyncOp, written.take());
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

// `into` are the blocks of one of the outputs, or of a list of them, by rank.
LockstepBackend::Plan LockstepBackend::all_gather_plan(const Outputs& outputs,
                                                       const at::Tensor& input,
                                                       std::vector<Block> into) {
  const at::Tensor kept = outputs.readable(input, into[rank_]);
  Exchange blocks{std::vector<Block>(size_, block_of(kept)), std::move(into), true};
  Plan plan = exchange_plan(call_of(Op::all_gather, kept), std::move(blocks));
  plan.body = holding({kept}, std::move(plan.body));
  return plan;
}

WorkPtr LockstepBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather";
  const at::Tensor& input = only(op, inputs);
  const Tensors& list = only(op, outputs);
  check_list(op, list, input, size_);
  Outputs written(op);
  std::vector<Block> into;
  for (const at::Tensor& output : list) into.push_back(block_of(written.add(output, false)));
  Plan plan = all_gather_plan(written, input, std::move(into));
  return start(c10d::OpType::ALLGATHER, list, {std::move(plan)}, opts.timeout, opts.asyncOp,
               written.take());
}

WorkPtr LockstepBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_coalesced";
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_, op, ": ", outputs.size(),
                    " lists of outputs for ", size_, " ranks");
  Outputs written(op);
  // outputs[rank][i] is the i-th tensor of that rank.
  std::vector<std::vector<Block>> into(inputs.size());
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), op, ": a list of ", list.size(),
                      " outputs for ", inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i)
      into[i].push_back(block_of(written.add(list[i], false)));
  }
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& list : outputs) check_dtypes(op, list[i], inputs[i]);
    plans.push_back(all_gather_plan(written, inputs[i], std::move(into[i])));
  }
  WorkPtr work = start(c10d::OpType::COALESCED, {}, std::move(plans), opts.timeout, opts.asyncOp,
                       written.take());
  return c10::make_intrusive<ManyWork>(std::vector{std::move(work)}, outputs);
}

// The blocks of a tensor that is gathered into, one for each of `n` ranks.
static std::vector<Block> slots_of(const char* op, const at::Tensor& output,
                                   const at::Tensor& input, int n) {
  check_dtypes(op, output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * n, op, ": the output has ",
                    output.numel(), " elements, ", n, " ranks give ", input.numel(), " each");
  std::vector<Block> blocks;
  char* to = static_cast<char*>(output.data_ptr());
  for (int r = 0; r < n; ++r) blocks.push_back({to + r * input.nbytes(), input.nbytes()});
  return blocks;
}

WorkPtr LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor";
  check_tensor(op, input);
  Outputs written(op);
  const at::Tensor into = written.add(output, false);
  Plan plan = all_gather_plan(written, input, slots_of(op, into, input, size_));
  return start(c10d::OpType::_ALLGATHER_BASE, {output}, {std::move(plan)}, opts.timeout,
               opts.asyncOp, written.take());
}

WorkPtr LockstepBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  Outputs written(op);
  Tensors into;
  for (const at::Tensor& output : outputs) into.push_back(written.add(output, false));
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(op, inputs[i]);
    plans.push_back(
        all_gather_plan(written, inputs[i], slots_of(op, into[i], inputs[i], size_)));
  }
  return start(c10d::OpType::COALESCED, outputs, std::move(plans), opts.timeout, opts.asyncOp,
               written.take());
}

}  // namespace lockstep
