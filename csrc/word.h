// One int64 of a tensor as a word that several ranks read and write at once.
//
// For decisions that must be made once: a step is committed, or it is not.
//
//     rank a   write what is decided about ... compare_exchange(open -> committed)
//     rank b   load() == committed         ... sees all that rank a wrote before
//
// Stores release and loads acquire, so what was written before is seen after. The
// tensor lies in memory that all of them map (backend.h, `share`).
#pragma once

#include <ATen/ATen.h>

#include "tensors.h"

namespace lockstep {

inline int64_t* word_of(const at::Tensor& tensor, int64_t index) {
  check_tensor("a word", tensor);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kLong && is_plain(tensor),
                    "a word is an element of a contiguous int64 tensor");
  TORCH_CHECK_INDEX(index >= 0 && index < tensor.numel(), "there is no word ", index, " in ",
                    tensor.numel());
  int64_t* word = static_cast<int64_t*>(tensor.data_ptr()) + index;
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(word) % sizeof(int64_t) == 0,
                    "a word must lie on a multiple of 8 bytes");
  return word;
}

inline int64_t load_word(const at::Tensor& tensor, int64_t index) {
  return __atomic_load_n(word_of(tensor, index), __ATOMIC_ACQUIRE);
}

inline void store_word(const at::Tensor& tensor, int64_t index, int64_t value) {
  __atomic_store_n(word_of(tensor, index), value, __ATOMIC_RELEASE);
}

// Writes `desired` if the word is `expected`; returns what it was, either way.
inline int64_t compare_exchange(const at::Tensor& tensor, int64_t index, int64_t expected,
                                int64_t desired) {
  __atomic_compare_exchange_n(word_of(tensor, index), &expected, desired, false, __ATOMIC_ACQ_REL,
                              __ATOMIC_ACQUIRE);
  return expected;
}

}  // namespace lockstep
