// Sparse all-reduce: COO tensors are added over the ranks along the tree.
//
//     rank 0   entries 1, 5    (1) every rank gets the shapes and counts of all ranks
//     rank 1   entries 5, 7    (2) their indices, (3) their values
//                              (4) entry 5 is added; 1 and 7 are copied
//
// Every rank does all the additions. The traffic is that of an all-gather of all entries, which
// is little where few are used: the gradients of large embeddings. As on Gloo, the result is
// coalesced. float16 and bfloat16 are added in float32 and rounded once.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "collective_call.h"

namespace lockstep {

class SparseAllReduce {
 public:
  // The tensors of this rank, which have one shape and dtype. Throws ArgumentError.
  explicit SparseAllReduce(std::vector<at::Tensor> tensors);

  // The steps, each in a call of its own.
  void gather_shapes(CollectiveCall& call);  // throws MismatchError if they differ
  void gather_indices(CollectiveCall& call);
  void gather_values(CollectiveCall& call);

  void write_sum();  // to the tensors of this rank

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor own_;                            // their sum, coalesced
  std::vector<int64_t> counts_;               // entries of each rank
  std::vector<at::Tensor> indices_, values_;  // of each rank
};

}  // namespace lockstep
