// What the calls of backend.h share: checking arguments, describing a call.
#pragma once

#include "backend.h"

namespace lockstep {

inline Call call_of(Op op, const at::Tensor& tensor, int root = -1) {
  Call call;
  call.op = op;
  call.dtype = static_cast<uint8_t>(tensor.scalar_type());
  call.root = root;
  call.count = static_cast<uint64_t>(tensor.numel());
  return call;
}

inline void set_reduction(Call& call, const char* op, const at::Tensor& tensor,
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

inline std::vector<Block> none(int n) { return std::vector<Block>(static_cast<size_t>(n)); }

inline const at::Tensor& only(const char* op, const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

inline const Tensors& only(const char* op, const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, " takes one list of tensors, not ", lists.size());
  return lists[0];
}

inline void check_dtypes(const char* op, const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), op, ": the tensors are ",
                    dtype_name(static_cast<int>(a.scalar_type())), " and ",
                    dtype_name(static_cast<int>(b.scalar_type())));
}

inline void check_list(const char* op, const Tensors& list, const at::Tensor& model, int n) {
  TORCH_CHECK_VALUE(static_cast<int>(list.size()) == n, op, ": a list of ", list.size(),
                    " tensors for ", n, " ranks");
  check_tensor(op, model);
  for (const at::Tensor& tensor : list) {
    check_tensor(op, tensor);
    check_dtypes(op, tensor, model);
  }
}

// Keeps tensors alive as long as a plan.
template <typename F>
auto holding(Tensors tensors, F body) {
  return [tensors = std::move(tensors), body = std::move(body)](Turn& turn) { body(turn); };
}

}  // namespace lockstep
