// torch's collective calls: arguments checked here, then handed to the core.
#include <limits>

#include "backend.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exchange.h"

namespace lockstep {
namespace {

Call call_of(Op op, const at::Tensor& tensor, int root = -1) {
  Call call;
  call.op = op;
  call.dtype = static_cast<uint8_t>(tensor.scalar_type());
  call.root = root;
  call.count = static_cast<uint64_t>(tensor.numel());
  return call;
}

void set_reduction(Call& call, const char* op, const at::Tensor& tensor,
                   const c10d::ReduceOp& reduce) {
  const auto number = static_cast<int>(reduce.op_);
  TORCH_CHECK_VALUE(number >= 0 && number < kReductions, op, ": unknown reduction");
  const Type type = type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(number);
  TORCH_CHECK_VALUE(supports(reduction, type), op, ": ", reduction_name(number),
                    " is not defined for ",
                    dtype_name(static_cast<int>(tensor.scalar_type())));
  call.reduction = static_cast<uint8_t>(number);
  if (reduction != Reduction::premul_sum) return;
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
  TORCH_CHECK_VALUE(factor, op, ": PREMUL_SUM has no factor");
  call.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                : factor->double_factor;
}

std::vector<Block> none(int n) { return std::vector<Block>(static_cast<size_t>(n)); }

const at::Tensor& only(const char* op, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

const Tensors& only(const char* op, const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, " takes one list of tensors, not ", lists.size());
  return lists[0];
}

void check_list(const char* op, const Tensors& list, const at::Tensor& model, int n) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == n, op, ": a list of ", list.size(),
                    " tensors for ", n, " ranks");
  for (const at::Tensor& tensor : list) {
    check_tensor(op, tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == model.scalar_type(), op, ": the tensors are ",
                      dtype_name(static_cast<int>(tensor.scalar_type())), " and ",
                      dtype_name(static_cast<int>(model.scalar_type())));
  }
}

// Keeps tensors alive as long as a plan.
template <typename F>
auto holding(Tensors tensors, F body) {
  return [tensors = std::move(tensors), body = std::move(body)](Turn& turn) { body(turn); };
}

}  // namespace

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
  return c10::make_intrusive<ManyWork>(std::move(works));
}

// ---- reduce-scatter ----

LockstepBackend::Plan LockstepBackend::reduce_scatter_plan(const char* op, Tensors inputs,
                                                           const at::Tensor& output,
                                                           const c10d::ReduceOp& reduction,
                                                           bool uneven) {
  Call call = call_of(Op::reduce_scatter, output);
  call.uneven = uneven;
  set_reduction(call, op, output, reduction);
  TORCH_CHECK_VALUE(inputs[rank_].numel() == output.numel(), op, ": the output has ",
                    output.numel(), " elements, the part for this rank has ",
                    inputs[rank_].numel());
  for (at::Tensor& input : inputs) {
    TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type(), op, ": the tensors are ",
                      dtype_name(static_cast<int>(input.scalar_type())), " and ",
                      dtype_name(static_cast<int>(output.scalar_type())));
    const bool same = &input == &inputs[rank_] && input.data_ptr() == output.data_ptr();
    if (!same && overlap(input, output)) input = input.clone();
  }
  std::vector<Block> send;
  for (const at::Tensor& input : inputs) send.push_back(block_of(input));
  const Type type = type_of(output.scalar_type());
  const auto how = static_cast<Reduction>(call.reduction);
  Body body = [output, send, type, how](Turn& turn) {
    lockstep::reduce_scatter(turn, send, static_cast<char*>(output.data_ptr()),
                   static_cast<size_t>(output.numel()), type, how);
  };
  return {call, holding(std::move(inputs), std::move(body))};
}

static Tensors parts_of(const char* op, const at::Tensor& whole, const at::Tensor& output, int n) {
  TORCH_CHECK_VALUE(whole.numel() == output.numel() * n, op, ": the input has ", whole.numel(),
                    " elements, ", n, " ranks get ", output.numel(), " each");
  const at::Tensor flat = whole.view({-1});
  Tensors parts;
  for (int r = 0; r < n; ++r)
    parts.push_back(flat.narrow(0, r * output.numel(), output.numel()));
  return parts;
}

WorkPtr LockstepBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter";
  Writable output(op, only(op, outputs), false);
  const Tensors& list = only(op, inputs);
  check_list(op, list, output.plain(), size_);
  Tensors parts;
  for (const at::Tensor& tensor : list) parts.push_back(readable(op, tensor));
  Plan plan = reduce_scatter_plan(op, std::move(parts), output.plain(), opts.reduceOp, true);
  return start(c10d::OpType::REDUCE_SCATTER, outputs, {std::move(plan)}, opts.timeout,
               opts.asyncOp, {output});
}

WorkPtr LockstepBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor";
  Writable written(op, output, false);
  Plan plan =
      reduce_scatter_plan(op, parts_of(op, readable(op, input), written.plain(), size_),
                          written.plain(), opts.reduceOp, true);
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {std::move(plan)}, opts.timeout,
               opts.asyncOp, {written});
}

WorkPtr LockstepBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  std::vector<Plan> plans;
  std::vector<Writable> written;
  for (size_t i = 0; i < inputs.size(); ++i) {
    written.emplace_back(op, outputs[i], false);
    const at::Tensor& output = written.back().plain();
    plans.push_back(reduce_scatter_plan(
        op, parts_of(op, readable(op, inputs[i]), output, size_), output, opts.reduceOp, true));
  }
  return start(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, std::move(plans),
               opts.timeout, opts.asyncOp, std::move(written));
}

// ---- all-to-all ----

static std::vector<Block> blocks_of(const char* what, const at::Tensor& tensor,
                                const std::vector<int64_t>& sizes, int n) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const size_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
  std::vector<Block> blocks;
  char* data = static_cast<char*>(tensor.data_ptr());
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % n == 0, "all_to_all_single: ", rows, " rows of the ", what,
                      " can't be split evenly for ", n, " ranks");
    for (int r = 0; r < n; ++r, data += row * (rows / n))
      blocks.push_back({data, row * static_cast<size_t>(rows / n)});
    return blocks;
  }
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == n, "all_to_all_single: ", sizes.size(),
                    " sizes for ", n, " ranks");
  int64_t total = 0;
  for (int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "all_to_all_single: a size of ", size);
    blocks.push_back({data, row * static_cast<size_t>(size)});
    data += blocks.back().bytes;
    total += size;
  }
  TORCH_CHECK_VALUE(total == rows, "all_to_all_single: the sizes of the ", what, " add up to ",
                    total, ", it has ", rows, " rows");
  return blocks;
}

WorkPtr LockstepBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_sizes,
                                       std::vector<int64_t>& input_sizes,
                                       const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all_single";
  Writable written(op, output, false);
  at::Tensor kept = readable(op, input);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, ": the tensors are ",
                    dtype_name(static_cast<int>(output.scalar_type())), " and ",
                    dtype_name(static_cast<int>(input.scalar_type())));
  if (overlap(kept, written.plain())) kept = kept.clone();
  Exchange blocks{blocks_of("input", kept, input_sizes, size_),
                  blocks_of("output", written.plain(), output_sizes, size_), false};
  Plan plan = exchange_plan(call_of(Op::all_to_all, kept), std::move(blocks));
  plan.body = holding({kept}, std::move(plan.body));
  return start(c10d::OpType::ALLTOALL_BASE, {output}, {std::move(plan)}, opts.timeout,
               opts.asyncOp, {written});
}

WorkPtr LockstepBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all";
  TORCH_CHECK_VALUE(!inputs.empty(), op, " takes a list of tensors for each rank");
  check_list(op, inputs, inputs[0], size_);
  check_list(op, outputs, inputs[0], size_);
  Exchange blocks{none(size_), none(size_), false};
  Tensors kept;
  std::vector<Writable> written;
  for (int r = 0; r < size_; ++r) {
    written.emplace_back(op, outputs[r], false);
    blocks.receive[r] = block_of(written.back().plain());
  }
  for (int r = 0; r < size_; ++r) {
    at::Tensor input = readable(op, inputs[r]);
    for (const Writable& output : written)
      if (overlap(input, output.plain())) input = input.clone();
    kept.push_back(input);
    blocks.send[r] = block_of(input);
  }
  // Each pair of ranks compares its own sizes; the whole count means nothing.
  Call call = call_of(Op::all_to_all, inputs[0]);
  Plan plan = exchange_plan(call, std::move(blocks));
  plan.body = holding(std::move(kept), std::move(plan.body));
  return start(c10d::OpType::ALLTOALL, outputs, {std::move(plan)}, opts.timeout, opts.asyncOp,
               std::move(written));
}

// ---- beside c10d ----

WorkPtr LockstepBackend::exact_sum(ExactBucket bucket, at::Tensor packed, at::Tensor result,
                                   at::Tensor present) {
  const char* op = "exact_sum";
  bucket.type = type_of(result.scalar_type());
  TORCH_CHECK_VALUE(result.is_floating_point() && bucket.type != Type::bytes, op,
                    ": adds floating-point tensors, not ",
                    dtype_name(static_cast<int>(result.scalar_type())));
  TORCH_CHECK_VALUE(static_cast<int>(bucket.holders.size()) == size_, op, ": holders of ",
                    bucket.holders.size(), " ranks in a group of ", size_);
  TORCH_CHECK_VALUE(is_plain(packed) && is_plain(result) && is_plain(present) &&
                        packed.nbytes() >= packed_bytes(bucket, rank_) &&
                        result.numel() >= static_cast<int64_t>(bucket.length) &&
                        present.nbytes() >= bucket.members.size(),
                    op, ": a buffer is too small or not contiguous");
  TORCH_CHECK_VALUE(Heap::here().find(packed.data_ptr(), packed_bytes(bucket, rank_)).shared() &&
                        Heap::here().find(result.data_ptr(), result.nbytes()).shared(),
                    op, ": the buffers must lie in shared memory (lockstep.empty)");
  Call call = call_of(Op::exact_sum, result);
  call.count = bucket.length;
  Body body = [bucket = std::move(bucket), packed, result, present](Turn& turn) {
    const std::vector<bool> any =
        lockstep::exact_sum(turn, bucket, static_cast<char*>(packed.data_ptr()),
                            static_cast<char*>(result.data_ptr()));
    auto* flags = static_cast<uint8_t*>(present.data_ptr());
    for (size_t m = 0; m < any.size(); ++m) flags[m] = any[m];
  };
  return start(c10d::OpType::UNKNOWN, {result}, {{call, std::move(body)}},
               std::chrono::milliseconds(0), true, {});
}

}  // namespace lockstep
