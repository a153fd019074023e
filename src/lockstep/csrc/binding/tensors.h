// torch's tensors as arguments of the core: checked, and contiguous.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "collectives/exchange.h"
#include "kernels.h"

namespace lockstep {

using Tensors = std::vector<at::Tensor>;

DataType data_type_of(at::ScalarType type);  // DataType::bytes if it cannot be reduced
std::string dtype_name(int scalar_type);     // "float32"

// Throws ArgumentError unless the tensor is a dense CPU tensor.
void check_tensor(const char* op, const at::Tensor& tensor);

// Whether the tensor's memory holds exactly its elements, in order and unconjugated.
bool is_plain(const at::Tensor& tensor);

// Writes 0 or 1 per value to the beginning of a tensor of bytes.
void write_flags(const at::Tensor& to, const std::vector<bool>& values);

// Returns the tensor, or a contiguous copy.
at::Tensor as_input(const char* op, const at::Tensor& tensor);

// A tensor that a call writes: the user's own, or a contiguous copy of it that `copy_back`
// copies to the user's. Non-contiguous tensors must work: torch 2.13's Gloo gives silently
// wrong values for them in broadcast, reduce, all_reduce, scatter and reduce_scatter, and
// writes beyond the memory of expanded ones.
class OutputTensor {
 public:
  // `is_read` initializes the copy with the present elements (in-place operations);
  // `force_copy` makes a copy in any case.
  OutputTensor(const char* op, const at::Tensor& tensor, bool is_read, bool force_copy = false);
  const at::Tensor& plain() const { return plain_; }
  void copy_back() const;

 private:
  at::Tensor target_, plain_;
};

Block block_of(const at::Tensor& tensor);
bool do_overlap(const at::Tensor& a, const at::Tensor& b);  // of two plain tensors

// The tensors that one call writes.
//
// Users may pass one tensor twice, or views of one tensor. The results are then those of
// Gloo, which copies all inputs first and writes all outputs last, in order: an output that
// overlaps an earlier one is replaced by a copy, and so is an input that overlaps an output.
class OutputList {
 public:
  explicit OutputList(const char* op) : op_(op) {}
  // Returns the tensor to write. `is_read` as for OutputTensor.
  at::Tensor add(const at::Tensor& tensor, bool is_read);
  // Returns a tensor to read, or a copy if it overlaps an output outside of `allowed`.
  at::Tensor as_input(const at::Tensor& tensor, const Block& allowed = {}) const;
  std::vector<OutputTensor> take() { return std::move(outputs_); }

 private:
  bool has_overlap(const Block& block, const Block& allowed) const;

  const char* op_;
  std::vector<OutputTensor> outputs_;
  std::map<const char*, const char*> ranges_;  // begin -> end of the outputs; disjoint
};

// Returns a new, uninitialized tensor in shared memory.
at::Tensor shared_empty(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace lockstep
