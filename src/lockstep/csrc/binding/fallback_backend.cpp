#include "fallback_backend.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "arguments.h"
#include "torch_errors.h"

namespace lockstep {

static bool is_elsewhere(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.device().is_cpu();
}

static bool is_elsewhere(const Tensors& tensors) {
  return !tensors.empty() && is_elsewhere(tensors[0]);
}

static bool is_sparse(const Tensors& tensors) {
  return !tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse;
}

static Tensors first_of(const std::vector<Tensors>& lists) {
  return lists.empty() ? Tensors{} : lists[0];
}

// Waits until the tensors have their values: calls are executed in another thread, whose current
// streams are not those of the caller.
static void synchronize(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!is_elsewhere(tensor)) continue;
    const c10::impl::VirtualGuardImpl device(tensor.device().type());
    device.getStream(tensor.device()).synchronize();
  }
}

// `tensor` is one whose dtype and number of elements are the same on all ranks.
template <typename Options>
static CallInfo make_forwarded_info(Op op, const at::Tensor& tensor, const Options& options) {
  CallInfo info;
  info.op = op;
  info.kind = tensor.layout() == at::kSparse ? TensorKind::sparse : TensorKind::on_device;
  info.dtype = static_cast<uint8_t>(tensor.scalar_type());
  info.count = static_cast<uint64_t>(tensor.numel());
  info.uneven = op == Op::all_to_all;
  if constexpr (requires { options.reduceOp; })
    info.reduction = static_cast<uint8_t>(options.reduceOp.op_);
  if constexpr (requires { options.rootRank; }) info.root = static_cast<int32_t>(options.rootRank);
  return info;
}

template <typename CallOptions, typename Call>
WorkPtr FallbackBackend::forward(Op op, c10d::OpType type, const Tensors& inputs, Tensors outputs,
                                 const CallOptions& options, Call call) {
  const CallInfo info = make_forwarded_info(op, inputs[0], options);
  const auto timeout =
      options.timeout > std::chrono::milliseconds(0) ? options.timeout : options_->timeout;
  synchronize(inputs);
  Body body = [gloo = gloo_, call, options, outputs, timeout](CollectiveCall& collective) mutable {
    gloo->run(collective, [&](c10d::Backend& backend) { return call(backend, options); }, timeout);
    synchronize(outputs);
  };
  return start(type, outputs, {{info, std::move(body)}}, timeout, options.asyncOp, {}, &inputs);
}

WorkPtr FallbackBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!is_elsewhere(tensors)) return CollectiveBackend::broadcast(tensors, options);
  return forward(Op::broadcast, c10d::OpType::BROADCAST, tensors, tensors, options,
                 [tensors](auto& gloo, const auto& options) mutable {
                   return gloo.broadcast(tensors, options);
                 });
}

WorkPtr FallbackBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!is_sparse(tensors) && !is_elsewhere(tensors))
    return CollectiveBackend::allreduce(tensors, options);
  check_alike("all_reduce", tensors);
  CHECK_ARGUMENT(!is_sparse(tensors) || options.reduceOp.op_ == c10d::ReduceOp::SUM,
                 "all_reduce: unsupported reduction operation: sparse tensors can only be added ",
                 "(SUM)");
  return forward(Op::all_reduce, c10d::OpType::ALLREDUCE, tensors, tensors, options,
                 [tensors](auto& gloo, const auto& options) mutable {
                   return gloo.allreduce(tensors, options);
                 });
}

WorkPtr FallbackBackend::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& options) {
  if (!is_elsewhere(tensors)) return CollectiveBackend::allreduce_coalesced(tensors, options);
  return forward(Op::all_reduce, c10d::OpType::ALLREDUCE_COALESCED, tensors, tensors, options,
                 [tensors](auto& gloo, const auto& options) mutable {
                   return gloo.allreduce_coalesced(tensors, options);
                 });
}

WorkPtr FallbackBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!is_elsewhere(tensors)) return CollectiveBackend::reduce(tensors, options);
  return forward(
      Op::reduce, c10d::OpType::REDUCE, tensors, tensors, options,
      [tensors](auto& gloo, const auto& options) mutable { return gloo.reduce(tensors, options); });
}

WorkPtr FallbackBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  if (!is_elsewhere(inputs)) return CollectiveBackend::allgather(outputs, inputs, options);
  return forward(Op::all_gather, c10d::OpType::ALLGATHER, inputs, first_of(outputs), options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.allgather(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  if (!is_elsewhere(input)) return CollectiveBackend::_allgather_base(output, input, options);
  return forward(Op::all_gather, c10d::OpType::_ALLGATHER_BASE, {input}, {output}, options,
                 [output, input](auto& gloo, const auto& options) mutable {
                   return gloo._allgather_base(output, input, options);
                 });
}

WorkPtr FallbackBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  if (!is_elsewhere(inputs))
    return CollectiveBackend::allgather_coalesced(outputs, inputs, options);
  return forward(Op::all_gather, c10d::OpType::ALLGATHER_COALESCED, inputs, first_of(outputs),
                 options, [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.allgather_coalesced(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  if (!is_elsewhere(inputs))
    return CollectiveBackend::allgather_into_tensor_coalesced(outputs, inputs, options);
  return forward(Op::all_gather, c10d::OpType::COALESCED, inputs, outputs, options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.allgather_into_tensor_coalesced(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& options) {
  if (!is_elsewhere(inputs)) return CollectiveBackend::gather(outputs, inputs, options);
  return forward(Op::gather, c10d::OpType::GATHER, inputs, first_of(outputs), options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.gather(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& options) {
  if (!is_elsewhere(outputs)) return CollectiveBackend::scatter(outputs, inputs, options);
  return forward(Op::scatter, c10d::OpType::SCATTER, outputs, outputs, options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.scatter(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& options) {
  if (!is_elsewhere(outputs)) return CollectiveBackend::reduce_scatter(outputs, inputs, options);
  return forward(Op::reduce_scatter, c10d::OpType::REDUCE_SCATTER, outputs, outputs, options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.reduce_scatter(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) {
  if (!is_elsewhere(output)) return CollectiveBackend::_reduce_scatter_base(output, input, options);
  return forward(Op::reduce_scatter, c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {output},
                 options, [output, input](auto& gloo, const auto& options) mutable {
                   return gloo._reduce_scatter_base(output, input, options);
                 });
}

WorkPtr FallbackBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (!is_elsewhere(outputs))
    return CollectiveBackend::reduce_scatter_tensor_coalesced(outputs, inputs, options);
  return forward(Op::reduce_scatter, c10d::OpType::_REDUCE_SCATTER_BASE, outputs, outputs, options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.reduce_scatter_tensor_coalesced(outputs, inputs, options);
                 });
}

WorkPtr FallbackBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_sizes,
                                       std::vector<int64_t>& input_sizes,
                                       const c10d::AllToAllOptions& options) {
  if (!is_elsewhere(input))
    return CollectiveBackend::alltoall_base(output, input, output_sizes, input_sizes, options);
  return forward(
      Op::all_to_all, c10d::OpType::ALLTOALL_BASE, {input}, {output}, options,
      [output, input, output_sizes, input_sizes](auto& gloo, const auto& options) mutable {
        return gloo.alltoall_base(output, input, output_sizes, input_sizes, options);
      });
}

WorkPtr FallbackBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& options) {
  if (!is_elsewhere(inputs)) return CollectiveBackend::alltoall(outputs, inputs, options);
  return forward(Op::all_to_all, c10d::OpType::ALLTOALL, inputs, outputs, options,
                 [outputs, inputs](auto& gloo, const auto& options) mutable {
                   return gloo.alltoall(outputs, inputs, options);
                 });
}

}  // namespace lockstep
