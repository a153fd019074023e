// torch's collective calls: each checks its arguments, then hands the call to the core.
#include "backend.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/exchange.h"
#include "collectives/reduce_scatter.h"
#include "collectives/share.h"

namespace lockstep {

static CallInfo make_call_info(Op op, const at::Tensor& tensor, int root = -1) {
  CallInfo info;
  info.op = op;
  info.dtype = static_cast<uint8_t>(tensor.scalar_type());
  info.root = root;
  info.count = static_cast<uint64_t>(tensor.numel());
  return info;
}

static void set_reduction(CallInfo& info, const char* op, const at::Tensor& tensor,
                          const c10d::ReduceOp& reduce) {
  const auto number = static_cast<int>(reduce.op_);
  TORCH_CHECK_VALUE(number >= 0 && number < kReductions, op, ": unknown reduction");
  const DataType type = data_type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(number);
  TORCH_CHECK_VALUE(is_supported(reduction, type), op, ": ", reduction_name(number),
                    " is not defined for ", dtype_name(static_cast<int>(tensor.scalar_type())));
  info.reduction = static_cast<uint8_t>(number);
  if (reduction != Reduction::premul_sum) return;
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
  TORCH_CHECK_VALUE(factor, op, ": PREMUL_SUM has no factor");
  info.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                : factor->double_factor;
}

static std::vector<Block> empty_blocks(int n) { return std::vector<Block>(static_cast<size_t>(n)); }

static const at::Tensor& single(const char* op, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

static const Tensors& single(const char* op, const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, " takes one list of tensors, not ", lists.size());
  return lists[0];
}

static void check_dtypes(const char* op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), op, ": the tensors are ",
                    dtype_name(static_cast<int>(a.scalar_type())), " and ",
                    dtype_name(static_cast<int>(b.scalar_type())));
}

static void check_list(const char* op, const Tensors& list, const at::Tensor& model, int n) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == n, op, ": a list of ", list.size(),
                    " tensors for ", n, " ranks");
  check_tensor(op, model);
  for (const at::Tensor& tensor : list) {
    check_tensor(op, tensor);
    check_dtypes(op, tensor, model);
  }
}

// Returns a body that keeps tensors alive for as long as it exists.
template <typename F>
auto keep_alive(Tensors tensors, F body) {
  return
      [tensors = std::move(tensors), body = std::move(body)](CollectiveCall& call) { body(call); };
}

LockstepBackend::PreparedCall LockstepBackend::prepare_exchange(CallInfo info,
                                                                ExchangeBlocks blocks) {
  info.uneven = 1;
  return {info, [blocks = std::move(blocks)](CollectiveCall& call) { exchange(call, blocks); }};
}

// ---- all-reduce, reduce, barrier ----

LockstepBackend::PreparedCall LockstepBackend::prepare_all_reduce(const at::Tensor& tensor,
                                                                  const c10d::ReduceOp& op,
                                                                  int root) {
  CallInfo info = make_call_info(root < 0 ? Op::all_reduce : Op::reduce, tensor, root);
  set_reduction(info, op_name(info.op), tensor, op);
  const DataType type = data_type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(info.reduction);
  return {info, [tensor, type, reduction, root](CollectiveCall& call) {
            all_reduce(call, tensor.data_ptr(), static_cast<size_t>(tensor.numel()), type,
                       reduction, root);
          }};
}

WorkPtr LockstepBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  OutputTensor tensor("all_reduce", single("all_reduce", tensors), true);
  return start(c10d::OpType::ALLREDUCE, tensors,
               {prepare_all_reduce(tensor.plain(), opts.reduceOp, -1)}, opts.timeout, opts.asyncOp,
               {tensor});
}

WorkPtr LockstepBackend::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<PreparedCall> calls;
  OutputList outputs("all_reduce_coalesced");
  for (const at::Tensor& tensor : tensors)
    calls.push_back(prepare_all_reduce(outputs.add(tensor, true), opts.reduceOp, -1));
  return start(c10d::OpType::ALLREDUCE_COALESCED, tensors, std::move(calls), opts.timeout,
               opts.asyncOp, outputs.take());
}

WorkPtr LockstepBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("reduce", root);
  const at::Tensor& given = single("reduce", tensors);
  if (root != rank_)
    return start(c10d::OpType::REDUCE, tensors,
                 {prepare_all_reduce(as_input("reduce", given), opts.reduceOp, root)}, opts.timeout,
                 opts.asyncOp, {});
  OutputTensor tensor("reduce", given, true);
  return start(c10d::OpType::REDUCE, tensors,
               {prepare_all_reduce(tensor.plain(), opts.reduceOp, root)}, opts.timeout,
               opts.asyncOp, {tensor});
}

WorkPtr LockstepBackend::barrier(const c10d::BarrierOptions& opts) {
  CallInfo info;
  info.op = Op::barrier;
  Body body = [](CollectiveCall& call) { lockstep::barrier(call); };
  return start(c10d::OpType::BARRIER, {}, {{info, std::move(body)}}, opts.timeout, opts.asyncOp,
               {});
}

void LockstepBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  // Every barrier of this backend names the missing ranks.
  c10d::BarrierOptions synchronous = opts;
  synchronous.asyncOp = false;
  barrier(synchronous)->wait();
}

// ---- broadcast, gather, scatter ----

WorkPtr LockstepBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("broadcast", root);
  const at::Tensor& given = single("broadcast", tensors);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), true};
  std::vector<OutputTensor> outputs;
  at::Tensor tensor;
  if (rank_ == root) {
    tensor = as_input("broadcast", given);
    for (int d = 0; d < size_; ++d)
      if (d != root) blocks.send[d] = block_of(tensor);
  } else {
    outputs.emplace_back("broadcast", given, false);
    tensor = outputs[0].plain();
    blocks.receive[root] = block_of(tensor);
  }
  PreparedCall call =
      prepare_exchange(make_call_info(Op::broadcast, given, root), std::move(blocks));
  call.body = keep_alive({tensor}, std::move(call.body));
  return start(c10d::OpType::BROADCAST, tensors, {std::move(call)}, opts.timeout, opts.asyncOp,
               std::move(outputs));
}

WorkPtr LockstepBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("gather", root);
  const at::Tensor& given = single("gather", inputs);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), true};
  OutputList written("gather");
  if (rank_ == root) {
    const Tensors& list = single("gather", outputs);
    check_list("gather", list, given, size_);
    for (int s = 0; s < size_; ++s) blocks.receive[s] = block_of(written.add(list[s], false));
  }
  const at::Tensor input = written.as_input(given, blocks.receive[root]);
  blocks.send[root] = block_of(input);
  PreparedCall call = prepare_exchange(make_call_info(Op::gather, input, root), std::move(blocks));
  call.body = keep_alive({input}, std::move(call.body));
  return start(c10d::OpType::GATHER, rank_ == root ? outputs[0] : Tensors{}, {std::move(call)},
               opts.timeout, opts.asyncOp, written.take());
}

WorkPtr LockstepBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("scatter", root);
  OutputTensor output("scatter", single("scatter", outputs), false);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), false};
  blocks.receive[root] = block_of(output.plain());
  Tensors plain;
  if (rank_ == root) {
    const Tensors& list = single("scatter", inputs);
    check_list("scatter", list, output.plain(), size_);
    for (int d = 0; d < size_; ++d) {
      plain.push_back(as_input("scatter", list[d]));
      blocks.send[d] = block_of(plain.back());
    }
  }
  PreparedCall call =
      prepare_exchange(make_call_info(Op::scatter, output.plain(), root), std::move(blocks));
  call.body = keep_alive(std::move(plain), std::move(call.body));
  return start(c10d::OpType::SCATTER, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               {output});
}

// ---- all-gather ----

// `receive` lists the blocks to receive into, by rank: parts of one output, or a list of them.
LockstepBackend::PreparedCall LockstepBackend::prepare_all_gather(const OutputList& outputs,
                                                                  const at::Tensor& input,
                                                                  std::vector<Block> receive) {
  const at::Tensor plain = outputs.as_input(input, receive[rank_]);
  ExchangeBlocks blocks{std::vector<Block>(size_, block_of(plain)), std::move(receive), true};
  PreparedCall call = prepare_exchange(make_call_info(Op::all_gather, plain), std::move(blocks));
  call.body = keep_alive({plain}, std::move(call.body));
  return call;
}

WorkPtr LockstepBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather";
  const at::Tensor& input = single(op, inputs);
  const Tensors& list = single(op, outputs);
  check_list(op, list, input, size_);
  OutputList written(op);
  std::vector<Block> receive;
  for (const at::Tensor& output : list) receive.push_back(block_of(written.add(output, false)));
  PreparedCall call = prepare_all_gather(written, input, std::move(receive));
  return start(c10d::OpType::ALLGATHER, list, {std::move(call)}, opts.timeout, opts.asyncOp,
               written.take());
}

WorkPtr LockstepBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_coalesced";
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_, op, ": ", outputs.size(),
                    " lists of outputs for ", size_, " ranks");
  OutputList written(op);
  // outputs[rank][i] is the i-th tensor of that rank.
  std::vector<std::vector<Block>> receive(inputs.size());
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), op, ": a list of ", list.size(),
                      " outputs for ", inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i)
      receive[i].push_back(block_of(written.add(list[i], false)));
  }
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& list : outputs) check_dtypes(op, list[i], inputs[i]);
    calls.push_back(prepare_all_gather(written, inputs[i], std::move(receive[i])));
  }
  WorkPtr work = start(c10d::OpType::COALESCED, {}, std::move(calls), opts.timeout, opts.asyncOp,
                       written.take());
  return c10::make_intrusive<CompositeWork>(std::vector{std::move(work)}, outputs);
}

// Splits the output of an all-gather into one block for each of `n` ranks.
static std::vector<Block> split_output(const char* op, const at::Tensor& output,
                                       const at::Tensor& input, int n) {
  check_dtypes(op, output, input);
  TORCH_CHECK_VALUE(output.numel() == input.numel() * n, op, ": the output has ", output.numel(),
                    " elements, but the inputs of ", n, " ranks have ", input.numel(), " each");
  std::vector<Block> blocks;
  char* to = static_cast<char*>(output.data_ptr());
  for (int r = 0; r < n; ++r) blocks.push_back({to + r * input.nbytes(), input.nbytes()});
  return blocks;
}

WorkPtr LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor";
  check_tensor(op, input);
  OutputList written(op);
  const at::Tensor into = written.add(output, false);
  PreparedCall call = prepare_all_gather(written, input, split_output(op, into, input, size_));
  return start(c10d::OpType::_ALLGATHER_BASE, {output}, {std::move(call)}, opts.timeout,
               opts.asyncOp, written.take());
}

WorkPtr LockstepBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  OutputList written(op);
  Tensors into;
  for (const at::Tensor& output : outputs) into.push_back(written.add(output, false));
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(op, inputs[i]);
    calls.push_back(
        prepare_all_gather(written, inputs[i], split_output(op, into[i], inputs[i], size_)));
  }
  return start(c10d::OpType::COALESCED, outputs, std::move(calls), opts.timeout, opts.asyncOp,
               written.take());
}

// ---- reduce-scatter ----

LockstepBackend::PreparedCall LockstepBackend::prepare_reduce_scatter(
    const char* op, Tensors inputs, const at::Tensor& output, const c10d::ReduceOp& reduce_op,
    bool uneven) {
  CallInfo info = make_call_info(Op::reduce_scatter, output);
  info.uneven = uneven;
  set_reduction(info, op, output, reduce_op);
  TORCH_CHECK_VALUE(inputs[rank_].numel() == output.numel(), op, ": the output has ",
                    output.numel(), " elements, but the input for this rank has ",
                    inputs[rank_].numel());
  for (at::Tensor& input : inputs) {
    check_dtypes(op, input, output);
    const bool is_in_place = &input == &inputs[rank_] && input.data_ptr() == output.data_ptr();
    if (!is_in_place && do_overlap(input, output)) input = input.clone();
  }
  std::vector<Block> send;
  for (const at::Tensor& input : inputs) send.push_back(block_of(input));
  const DataType type = data_type_of(output.scalar_type());
  const auto reduction = static_cast<Reduction>(info.reduction);
  Body body = [output, send, type, reduction](CollectiveCall& call) {
    lockstep::reduce_scatter(call, send, static_cast<char*>(output.data_ptr()),
                             static_cast<size_t>(output.numel()), type, reduction);
  };
  return {info, keep_alive(std::move(inputs), std::move(body))};
}

static Tensors split_input(const char* op, const at::Tensor& input, const at::Tensor& output,
                           int n) {
  TORCH_CHECK_VALUE(input.numel() == output.numel() * n, op, ": the input has ", input.numel(),
                    " elements, but the outputs of ", n, " ranks have ", output.numel(), " each");
  const at::Tensor flat = input.view({-1});
  Tensors parts;
  for (int r = 0; r < n; ++r) parts.push_back(flat.narrow(0, r * output.numel(), output.numel()));
  return parts;
}

WorkPtr LockstepBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter";
  OutputTensor output(op, single(op, outputs), false);
  const Tensors& list = single(op, inputs);
  check_list(op, list, output.plain(), size_);
  Tensors parts;
  for (const at::Tensor& tensor : list) parts.push_back(as_input(op, tensor));
  PreparedCall call =
      prepare_reduce_scatter(op, std::move(parts), output.plain(), opts.reduceOp, true);
  return start(c10d::OpType::REDUCE_SCATTER, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               {output});
}

WorkPtr LockstepBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor";
  OutputTensor written(op, output, false);
  PreparedCall call =
      prepare_reduce_scatter(op, split_input(op, as_input(op, input), written.plain(), size_),
                             written.plain(), opts.reduceOp, true);
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {std::move(call)}, opts.timeout,
               opts.asyncOp, {written});
}

WorkPtr LockstepBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  OutputList written(op);
  Tensors plain;
  for (const at::Tensor& output : outputs) plain.push_back(written.add(output, false));
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = written.as_input(inputs[i], block_of(plain[i]));
    calls.push_back(prepare_reduce_scatter(op, split_input(op, input, plain[i], size_), plain[i],
                                           opts.reduceOp, true));
  }
  return start(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, std::move(calls),
               opts.timeout, opts.asyncOp, written.take());
}

// ---- all-to-all ----

// Splits the rows of a tensor into one block per rank; evenly if `sizes` is empty.
static std::vector<Block> split_rows(const char* what, const at::Tensor& tensor,
                                     const std::vector<int64_t>& sizes, int n) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const size_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
  std::vector<Block> blocks;
  char* data = static_cast<char*>(tensor.data_ptr());
  if (sizes.empty()) {
    TORCH_CHECK_VALUE(rows % n == 0, "all_to_all_single: ", rows, " rows of the ", what,
                      " can't be split evenly among ", n, " ranks");
    for (int r = 0; r < n; ++r, data += row * (rows / n))
      blocks.push_back({data, row * static_cast<size_t>(rows / n)});
    return blocks;
  }
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == n, "all_to_all_single: ", sizes.size(),
                    " sizes for ", n, " ranks");
  int64_t total = 0;
  for (int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "all_to_all_single: negative size ", size);
    blocks.push_back({data, row * static_cast<size_t>(size)});
    data += blocks.back().bytes;
    total += size;
  }
  TORCH_CHECK_VALUE(total == rows, "all_to_all_single: the sizes of the ", what, " add up to ",
                    total, ", but it has ", rows, " rows");
  return blocks;
}

WorkPtr LockstepBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_sizes,
                                       std::vector<int64_t>& input_sizes,
                                       const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all_single";
  OutputTensor written(op, output, false);
  at::Tensor plain = as_input(op, input);
  check_dtypes(op, output, input);
  if (do_overlap(plain, written.plain())) plain = plain.clone();
  ExchangeBlocks blocks{split_rows("input", plain, input_sizes, size_),
                        split_rows("output", written.plain(), output_sizes, size_), false};
  PreparedCall call = prepare_exchange(make_call_info(Op::all_to_all, plain), std::move(blocks));
  call.body = keep_alive({plain}, std::move(call.body));
  return start(c10d::OpType::ALLTOALL_BASE, {output}, {std::move(call)}, opts.timeout, opts.asyncOp,
               {written});
}

WorkPtr LockstepBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all";
  TORCH_CHECK_VALUE(!inputs.empty(), op, " takes a list of tensors for each rank");
  check_list(op, inputs, inputs[0], size_);
  check_list(op, outputs, inputs[0], size_);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), false};
  Tensors plain;
  OutputList written(op);
  for (int r = 0; r < size_; ++r) blocks.receive[r] = block_of(written.add(outputs[r], false));
  for (int r = 0; r < size_; ++r) {
    plain.push_back(written.as_input(inputs[r]));
    blocks.send[r] = block_of(plain.back());
  }
  // The sizes are compared for each pair of ranks; the count of the first input is not.
  CallInfo info = make_call_info(Op::all_to_all, inputs[0]);
  PreparedCall call = prepare_exchange(info, std::move(blocks));
  call.body = keep_alive(std::move(plain), std::move(call.body));
  return start(c10d::OpType::ALLTOALL, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               written.take());
}

// ---- calls that c10d does not have ----

WorkPtr LockstepBackend::exact_sum(ExactBucket bucket, at::Tensor packed, at::Tensor result,
                                   at::Tensor present, std::optional<at::Tensor> own) {
  const char* op = "exact_sum";
  bucket.type = data_type_of(result.scalar_type());
  TORCH_CHECK_VALUE(result.is_floating_point() && bucket.type != DataType::bytes, op,
                    ": supports floating-point tensors, not ",
                    dtype_name(static_cast<int>(result.scalar_type())));
  TORCH_CHECK_VALUE(static_cast<int>(bucket.holders.size()) == size_, op, ": holders for ",
                    bucket.holders.size(), " ranks in a group of ", size_);
  TORCH_CHECK_VALUE(is_plain(packed) && is_plain(result) && is_plain(present) &&
                        packed.nbytes() >= packed_bytes(bucket, rank_) &&
                        result.numel() >= static_cast<int64_t>(bucket.length) &&
                        present.nbytes() >= bucket.members.size(),
                    op, ": a buffer is too small or not contiguous");
  TORCH_CHECK_VALUE(!own || (is_plain(*own) && own->scalar_type() == result.scalar_type() &&
                             own->numel() == static_cast<int64_t>(bucket.length)),
                    op, ": `own` must have the length and dtype of the bucket");
  TORCH_CHECK_VALUE(
      Heap::instance().find(packed.data_ptr(), packed_bytes(bucket, rank_)).is_shared() &&
          (bucket.scatter || Heap::instance().find(result.data_ptr(), result.nbytes()).is_shared()),
      op, ": the buffers must be in shared memory (lockstep.empty_shared)");
  try {
    check(bucket, rank_, static_cast<char*>(packed.data_ptr()),
          static_cast<char*>(result.data_ptr()));
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
  CallInfo info = make_call_info(Op::exact_sum, result);
  info.count = bucket.length;
  info.plan_digest = bucket.digest();
  Body body = [bucket = std::move(bucket), packed, result, present, own](CollectiveCall& call) {
    const char* values = own ? static_cast<const char*>(own->data_ptr()) : nullptr;
    const std::vector<bool> is_new =
        lockstep::exact_sum(call, bucket, static_cast<char*>(packed.data_ptr()),
                            static_cast<char*>(result.data_ptr()), values);
    auto* flags = static_cast<uint8_t*>(present.data_ptr());
    for (size_t m = 0; m < is_new.size(); ++m) flags[m] = is_new[m];
  };
  return start(c10d::OpType::UNKNOWN, {result}, {{info, std::move(body)}},
               std::chrono::milliseconds(0), true, {});
}

at::Tensor LockstepBackend::share(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "share: negative number of bytes: ", bytes);
  CallInfo info;
  info.op = Op::share;
  info.count = static_cast<uint64_t>(bytes);
  auto segment = std::make_shared<std::unique_ptr<Segment>>();
  Body body = [segment, bytes](CollectiveCall& call) {
    *segment = lockstep::share(call, static_cast<uint64_t>(bytes));
  };
  start(c10d::OpType::UNKNOWN, {}, {{info, std::move(body)}}, std::chrono::milliseconds(0), false,
        {});
  char* data = (*segment)->data() + kSharedStart;
  return at::from_blob(
      data, {bytes}, [segment](void*) { segment->reset(); }, at::TensorOptions().dtype(at::kByte));
}

}  // namespace lockstep
