// torch's collective calls in which every rank gets another part: reduce-scatter and
// all-to-all; and the exact sum, which c10d has no call for.
#include "calls.h"
#include "collectives/exchange.h"
#include "collectives/share.h"

namespace lockstep {

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
    check_dtypes(op, input, output);
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
  Outputs written(op);
  Tensors plain;
  for (const at::Tensor& output : outputs) plain.push_back(written.add(output, false));
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = written.readable(inputs[i], block_of(plain[i]));
    plans.push_back(reduce_scatter_plan(op, parts_of(op, input, plain[i], size_), plain[i],
                                        opts.reduceOp, true));
  }
  return start(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, std::move(plans),
               opts.timeout, opts.asyncOp, written.take());
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
  check_dtypes(op, output, input);
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
  Outputs written(op);
  for (int r = 0; r < size_; ++r) blocks.receive[r] = block_of(written.add(outputs[r], false));
  for (int r = 0; r < size_; ++r) {
    kept.push_back(written.readable(inputs[r]));
    blocks.send[r] = block_of(kept.back());
  }
  // Each pair of ranks compares its own sizes; the whole count means nothing.
  Call call = call_of(Op::all_to_all, inputs[0]);
  Plan plan = exchange_plan(call, std::move(blocks));
  plan.body = holding(std::move(kept), std::move(plan.body));
  return start(c10d::OpType::ALLTOALL, outputs, {std::move(plan)}, opts.timeout, opts.asyncOp,
               written.take());
}

// ---- beside c10d ----

WorkPtr LockstepBackend::exact_sum(ExactBucket bucket, at::Tensor packed, at::Tensor result,
                                   at::Tensor present, std::optional<at::Tensor> own) {
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
  TORCH_CHECK_VALUE(!own || (is_plain(*own) && own->scalar_type() == result.scalar_type() &&
                             own->numel() == static_cast<int64_t>(bucket.length)),
                    op, ": values of one's own fill the bucket, with its dtype");
  TORCH_CHECK_VALUE(
      Heap::here().find(packed.data_ptr(), packed_bytes(bucket, rank_)).shared() &&
          (bucket.scatter || Heap::here().find(result.data_ptr(), result.nbytes()).shared()),
      op, ": the buffers must lie in shared memory (lockstep.empty)");
  try {
    check(bucket, rank_, static_cast<char*>(packed.data_ptr()),
          static_cast<char*>(result.data_ptr()));
  } catch (...) {
    std::rethrow_exception(as_torch_error());
  }
  Call call = call_of(Op::exact_sum, result);
  call.count = bucket.length;
  call.plan = bucket.digest();
  Body body = [bucket = std::move(bucket), packed, result, present, own](Turn& turn) {
    const char* values = own ? static_cast<const char*>(own->data_ptr()) : nullptr;
    const std::vector<bool> any =
        lockstep::exact_sum(turn, bucket, static_cast<char*>(packed.data_ptr()),
                            static_cast<char*>(result.data_ptr()), values);
    auto* flags = static_cast<uint8_t*>(present.data_ptr());
    for (size_t m = 0; m < any.size(); ++m) flags[m] = any[m];
  };
  return start(c10d::OpType::UNKNOWN, {result}, {{call, std::move(body)}},
               std::chrono::milliseconds(0), true, {});
}

at::Tensor LockstepBackend::share(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "share: ", bytes, " bytes");
  Call call;
  call.op = Op::share;
  call.count = static_cast<uint64_t>(bytes);
  auto segment = std::make_shared<std::unique_ptr<Segment>>();
  Body body = [segment, bytes](Turn& turn) {
    *segment = lockstep::share(turn, static_cast<uint64_t>(bytes));
  };
  start(c10d::OpType::UNKNOWN, {}, {{call, std::move(body)}}, std::chrono::milliseconds(0), false,
        {});
  char* data = (*segment)->data() + kSharedStart;
  return at::from_blob(data, {bytes}, [segment](void*) { segment->reset(); },
                       at::TensorOptions().dtype(at::kByte));
}

}  // namespace lockstep
