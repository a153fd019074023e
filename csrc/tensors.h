// Tensors on their way into the core: checked, and contiguous.
#pragma once

#include <ATen/ATen.h>

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
  // `keep` copies its present elements into the stand-in (in-place operations).
  Writable(const char* op, const at::Tensor& tensor, bool keep);
  const at::Tensor& plain() const { return plain_; }
  char* data() const { return static_cast<char*>(plain_.data_ptr()); }
  void settle() const;

 private:
  at::Tensor target_, plain_;
};

Block block_of(const at::Tensor& tensor);
// Whether two plain tensors share memory.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// A new tensor of shared memory, uninitialised.
at::Tensor shared_empty(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace lockstep
