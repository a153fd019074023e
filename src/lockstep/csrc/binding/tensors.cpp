#include "tensors.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "heap.h"
#include "torch_errors.h"

namespace lockstep {

DataType data_type_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DataType::f64;
    case at::kFloat: return DataType::f32;
    case at::kHalf: return DataType::f16;
    case at::kBFloat16: return DataType::bf16;
    case at::kChar: return DataType::i8;
    case at::kShort: return DataType::i16;
    case at::kInt: return DataType::i32;
    case at::kLong: return DataType::i64;
    case at::kByte: return DataType::u8;
    case at::kUInt16: return DataType::u16;
    case at::kUInt32: return DataType::u32;
    case at::kUInt64: return DataType::u64;
    case at::kBool: return DataType::boolean;
    case at::kComplexFloat: return DataType::c64;
    case at::kComplexDouble: return DataType::c128;
    default: return DataType::bytes;
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
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: return c10::toString(static_cast<at::ScalarType>(scalar_type));
  }
}

void check_tensor(const char* op, const at::Tensor& tensor) {
  CHECK_ARGUMENT(tensor.defined(), op, ": a tensor is undefined");
  CHECK_ARGUMENT(tensor.device().is_cpu(), op, ": the backend lockstep supports CPU tensors, not ",
                 "tensors on ", tensor.device().str());
  CHECK_ARGUMENT(tensor.layout() == at::kStrided, op,
                 ": the backend lockstep supports dense tensors, not ", tensor.layout(),
                 " ones; use to_dense() first");
  CHECK_ARGUMENT(!tensor.is_quantized(), op,
                 ": the backend lockstep does not support quantized tensors");
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

void write_flags(const at::Tensor& to, const std::vector<bool>& values) {
  auto* flags = static_cast<uint8_t*>(to.data_ptr());
  for (size_t i = 0; i < values.size(); ++i) flags[i] = values[i];
}

at::Tensor as_input(const char* op, const at::Tensor& tensor) {
  check_tensor(op, tensor);
  if (is_plain(tensor)) return tensor.detach();
  at::NoGradGuard guard;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

OutputTensor::OutputTensor(const char* op, const at::Tensor& tensor, bool is_read, bool force_copy)
    : target_(tensor) {
  check_tensor(op, tensor);
  at::NoGradGuard guard;
  if (is_plain(tensor) && !force_copy) {
    plain_ = tensor.detach();
    return;
  }
  plain_ = at::empty(tensor.sizes(), tensor.options().memory_format(c10::nullopt));
  if (is_read) plain_.copy_(tensor.detach());
}

void OutputTensor::copy_back() const {
  if (plain_.data_ptr() == target_.data_ptr()) return;
  at::NoGradGuard guard;
  target_.detach().copy_(plain_);
}

Block block_of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

bool do_overlap(const at::Tensor& a, const at::Tensor& b) {
  const char* x = static_cast<const char*>(a.data_ptr());
  const char* y = static_cast<const char*>(b.data_ptr());
  return x < y + b.nbytes() && y < x + a.nbytes();
}

static const char* end_of(const Block& block) { return block.data + block.bytes; }

at::Tensor OutputList::add(const at::Tensor& tensor, bool is_read) {
  check_tensor(op_, tensor);
  const bool force_copy = is_plain(tensor) && has_overlap(block_of(tensor), {});
  const at::Tensor plain = outputs_.emplace_back(op_, tensor, is_read, force_copy).plain();
  if (const Block block = block_of(plain); block.bytes) ranges_.emplace(block.data, end_of(block));
  return plain;
}

at::Tensor OutputList::as_input(const at::Tensor& tensor, const Block& allowed) const {
  at::Tensor plain = lockstep::as_input(op_, tensor);
  return has_overlap(block_of(plain), allowed) ? plain.clone() : plain;
}

// Whether a block shares memory with an output, outside of `allowed`.
bool OutputList::has_overlap(const Block& block, const Block& allowed) const {
  if (!block.bytes) return false;
  auto range = ranges_.upper_bound(block.data);
  if (range != ranges_.begin() && std::prev(range)->second > block.data) --range;
  for (; range != ranges_.end() && range->first < end_of(block); ++range) {
    const char* from = std::max<const char*>(range->first, block.data);
    const char* to = std::min(range->second, end_of(block));
    if (from < allowed.data || to > end_of(allowed)) return true;
  }
  return false;
}

// Returns the bytes of a tensor; throws ValueError if they overflow.
static uint64_t byte_size(at::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool is_empty = false, too_large = false;
  for (int64_t size : sizes) {
    CHECK_ARGUMENT(size >= 0, "a tensor can't have ", size, " elements in a dimension");
    is_empty |= size == 0;
    // Strides are computed as if empty dimensions had size 1.
    too_large |= __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
  }
  CHECK_ARGUMENT(!too_large, "a tensor can't have the sizes ", sizes,
                 ": its bytes overflow 64 bits");
  return is_empty ? 0 : static_cast<uint64_t>(bytes);
}

at::Tensor shared_empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  void* data = Heap::instance().allocate(byte_size(sizes, dtype));
  return at::from_blob(
      data, sizes, [](void* block) { Heap::instance().free(block); },
      at::TensorOptions().dtype(dtype));
}

}  // namespace lockstep
