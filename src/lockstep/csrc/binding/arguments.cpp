#include "arguments.h"

#include "torch_errors.h"

namespace lockstep {

const at::Tensor& single(const char* op, const Tensors& tensors, const char* role) {
  CHECK_ARGUMENT(tensors.size() == 1, op, " requires a single-element ", role,
                 "tensor list, not one of ", tensors.size());
  return tensors[0];
}

const Tensors& single(const char* op, const std::vector<Tensors>& lists, const char* role, int n) {
  CHECK_ARGUMENT(lists.size() == 1, op, " requires a single-element ", role,
                 " list containing a list with ", n, " tensors, not one of ", lists.size());
  return lists[0];
}

void check_alike(const char* op, const Tensors& tensors) {
  CHECK_ARGUMENT(!tensors.empty(), op, " requires non-empty tensor lists");
  const at::Tensor& first = tensors[0];
  for (size_t i = 1; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    CHECK_ARGUMENT(tensor.layout() == first.layout(), op, ": invalid tensor layout at index ", i,
                   ": ", tensor.layout(), ", and the first is ", first.layout());
    CHECK_ARGUMENT(tensor.scalar_type() == first.scalar_type(), op,
                   ": invalid tensor type at index ", i, ": ",
                   dtype_name(static_cast<int>(tensor.scalar_type())), ", and the first is ",
                   dtype_name(static_cast<int>(first.scalar_type())));
    CHECK_ARGUMENT(tensor.sizes() == first.sizes(), op, ": invalid tensor size at index ", i, ": ",
                   tensor.sizes(), ", and the first has ", first.sizes());
  }
}

void check_dtypes(const char* op, const at::Tensor& a, const at::Tensor& b) {
  CHECK_ARGUMENT(a.scalar_type() == b.scalar_type(), op,
                 ": invalid tensor type: ", dtype_name(static_cast<int>(a.scalar_type())),
                 " beside ", dtype_name(static_cast<int>(b.scalar_type())));
}

void check_list(const char* op, const char* role, const Tensors& list, const at::Tensor& model,
                int n) {
  CHECK_ARGUMENT(static_cast<int>(list.size()) == n, op, ": Incorrect ", role, " list size ",
                 list.size(), ". ", role[0] == 'i' ? "Input" : "Output", " list size should be ", n,
                 ", the number of ranks");
  check_tensor(op, model);
  for (const at::Tensor& tensor : list) {
    check_tensor(op, tensor);
    check_dtypes(op, tensor, model);
  }
}

void check_root_tensor(const char* op, int64_t index, const Tensors& tensors) {
  CHECK_ARGUMENT(index >= 0 && index < static_cast<int64_t>(tensors.size()), op,
                 ": invalid root tensor: there is no tensor ", index, " in a list of ",
                 tensors.size());
}

}  // namespace lockstep
