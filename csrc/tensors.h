// Tensors on their way into the core: checked, and contiguous.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "collectives/exchange.h"
#include "reduce.h"

namespace lockstep {

Type type_of(at::ScalarType type);           // Type::bytes where it only moves
std::string dtype_name(int scalar_type);     // "float32"

// Throws ValueError unless it is a dense tensor in the memory of this host.
void check_tensor(const char* op, const at::Tensor& tensor);

// Whether its bytes are its elements, one after the other.
bool is_plain(const at::Tensor& tensor);

// A tensor to read: itself, or a contiguous copy.
at::Tensor readable(const char* op, const at::Tensor& tensor);

// A tensor to write: itself, or a contiguous stand-in that `settle` copies back.
class Writable {
 public:
  // `keep` copies its present elements into the stand-in (in-place operations); `apart`
  // asks for a stand-in in any case.
  Writable(const char* op, const at::Tensor& tensor, bool keep, bool apart = false);
  const at::Tensor& plain() const { return plain_; }
  void settle() const;

 private:
  at::Tensor target_, plain_;
};

Block block_of(const at::Tensor& tensor);
// Whether two plain tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// The tensors that one call writes, where there are several.
//
// Users may pass one tensor twice, or views of one tensor. The results are then Gloo's,
// which copies all inputs first and writes all outputs last, in order: an output that
// overlaps an earlier one gets a stand-in, and an input that overlaps an output is copied.
class Outputs {
 public:
  explicit Outputs(const char* op) : op_(op) {}
  // Returns the tensor to write. `keep` as for Writable.
  at::Tensor add(const at::Tensor& tensor, bool keep);
  // A tensor to read, or a copy if it overlaps an output outside of `own`.
  at::Tensor readable(const at::Tensor& tensor, const Block& own = {}) const;
  std::vector<Writable> take() { return std::move(written_); }

 private:
  bool overlap(const Block& block, const Block& except) const;

  const char* op_;
  std::vector<Writable> written_;
  std::map<const char*, const char*> ranges_;  // begin -> end of what is written; disjoint
};

// A new tensor of shared memory, uninitialised.
at::Tensor shared_empty(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace lockstep
