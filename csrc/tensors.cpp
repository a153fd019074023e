#include "tensors.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "heap.h"

namespace lockstep {

Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Type::f64;
    case at::kFloat: return Type::f32;
    case at::kHalf: return Type::f16;
    case at::kBFloat16: return Type::bf16;
    case at::kChar: return Type::i8;
    case at::kShort: return Type::i16;
    case at::kInt: return Type::i32;
    case at::kLong: return Type::i64;
    case at::kByte: return Type::u8;
    case at::kUInt16: return Type::u16;
    case at::kUInt32: return Type::u32;
    case at::kUInt64: return Type::u64;
    case at::kBool: return Type::boolean;
    case at::kComplexFloat: return Type::c64;
    case at::kComplexDouble: return Type::c128;
    default: return Type::bytes;
  }
}

std::string dtype_name(int scalar_type) {
  switch (static_cast<at::ScalarType>(scalar_type)) {
    case at::kDouble: return "float64";
    case at::kFloat: return "float32";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kByte: return "uint8";
    case at::kBool: return "bool";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(static_cast<at::ScalarType>(scalar_type));
  }
}

void check_tensor(const char* op, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": a tensor is missing");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), op, ": the backend lockstep moves CPU tensors, not ",
                    "one on ", tensor.device().str());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op,
                    ": the backend lockstep moves dense tensors, not ", tensor.layout(),
                    " ones; use to_dense() first");
  TORCH_CHECK_VALUE(!tensor.is_quantized(), op, ": the backend lockstep moves no quantized tensors");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor readable(const char* op, const at::Tensor& tensor) {
  check_tensor(op, tensor);
  if (is_plain(tensor)) return tensor.detach();
  at::NoGradGuard guard;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

Writable::Writable(const char* op, const at::Tensor& tensor, bool keep, bool apart)
    : target_(tensor) {
  check_tensor(op, tensor);
  at::NoGradGuard guard;
  if (is_plain(tensor) && !apart) {
    plain_ = tensor.detach();
    return;
  }
  plain_ = at::empty(tensor.sizes(), tensor.options().memory_format(c10::nullopt));
  if (keep) plain_.copy_(tensor.detach());
}

void Writable::settle() const {
  if (plain_.data_ptr() == target_.data_ptr()) return;
  at::NoGradGuard guard;
  target_.detach().copy_(plain_);
}

Block block_of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const char* x = static_cast<const char*>(a.data_ptr());
  const char* y = static_cast<const char*>(b.data_ptr());
  return x < y + b.nbytes() && y < x + a.nbytes();
}

static const char* end_of(const Block& block) { return block.data + block.bytes; }

at::Tensor Outputs::add(const at::Tensor& tensor, bool keep) {
  check_tensor(op_, tensor);
  const bool apart = is_plain(tensor) && overlap(block_of(tensor), {});
  const at::Tensor plain = written_.emplace_back(op_, tensor, keep, apart).plain();
  if (const Block block = block_of(plain); block.bytes) ranges_.emplace(block.data, end_of(block));
  return plain;
}

at::Tensor Outputs::readable(const at::Tensor& tensor, const Block& own) const {
  at::Tensor plain = lockstep::readable(op_, tensor);
  return overlap(block_of(plain), own) ? plain.clone() : plain;
}

// Whether a block shares memory with an output, outside of `except`.
bool Outputs::overlap(const Block& block, const Block& except) const {
  if (!block.bytes) return false;
  auto range = ranges_.upper_bound(block.data);
  if (range != ranges_.begin() && std::prev(range)->second > block.data) --range;
  for (; range != ranges_.end() && range->first < end_of(block); ++range) {
    const char* from = std::max<const char*>(range->first, block.data);
    const char* to = std::min(range->second, end_of(block));
    if (from < except.data || to > end_of(except)) return true;
  }
  return false;
}

// The bytes of a tensor; throws ValueError where no memory can have so many.
static uint64_t bytes_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t most = static_cast<int64_t>(c10::elementSize(dtype));
  bool none = false, too_large = false;
  for (int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "a tensor can't have ", size, " elements in a dimension");
    none |= size == 0;
    // Strides count without the dimensions that are empty.
    too_large |= __builtin_mul_overflow(most, std::max<int64_t>(size, 1), &most);
  }
  TORCH_CHECK_VALUE(!too_large, "a tensor can't have the sizes ", sizes,
                    ": no memory has so many bytes");
  return none ? 0 : static_cast<uint64_t>(most);
}

at::Tensor shared_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  void* data = Heap::here().allocate(bytes_of(sizes, dtype));
  return at::from_blob(data, sizes, [](void* block) { Heap::here().free(block); },
                       at::TensorOptions().dtype(dtype));
}

}  // namespace lockstep
