#include "sparse_all_reduce.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "collectives/exchange.h"
#include "errors.h"
#include "group.h"
#include "tensors.h"
#include "torch_errors.h"
#include "tree_reduce.h"

namespace lockstep {

constexpr size_t kMaxDimensions = 16;

namespace {

struct Shape {
  int64_t count = 0;  // of entries
  int64_t sparse_dimensions = 0, dimensions = 0;
  std::array<int64_t, kMaxDimensions> sizes{};

  bool matches(const Shape& other) const {
    return sparse_dimensions == other.sparse_dimensions && dimensions == other.dimensions &&
           sizes == other.sizes;
  }
  std::string format() const {
    std::ostringstream text;
    text << "sizes " << at::IntArrayRef(sizes.data(), static_cast<size_t>(dimensions)) << ", "
         << sparse_dimensions << " of them sparse";
    return text.str();
  }
};

Shape shape_of(const at::Tensor& tensor) {
  Shape shape;
  shape.count = tensor._nnz();
  shape.sparse_dimensions = tensor.sparse_dim();
  shape.dimensions = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), shape.sizes.begin());
  return shape;
}

// Adds parts, which are coalesced, along the tree.
at::Tensor add_along_tree(const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> stack;
  for (int step : tree_steps(static_cast<int>(parts.size()))) {
    if (step != kCombine) {
      stack.push_back(parts[static_cast<size_t>(step)]);
      continue;
    }
    const at::Tensor right = std::move(stack.back());
    stack.pop_back();
    stack.back() = at::add(stack.back(), right).coalesce();
  }
  return stack.back();
}

void gather(CollectiveCall& call, const Block& own, std::vector<Block> receive) {
  exchange(call, {std::vector<Block>(receive.size(), own), std::move(receive), true});
}

}  // namespace

SparseAllReduce::SparseAllReduce(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  at::NoGradGuard guard;
  CHECK_ARGUMENT(static_cast<size_t>(tensors_[0].dim()) <= kMaxDimensions,
                 "all_reduce: a sparse tensor with ", tensors_[0].dim(),
                 " dimensions; the backend lockstep supports up to ", kMaxDimensions);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors_) {
    CHECK_ARGUMENT(tensor.device().is_cpu(),
                   "all_reduce: the backend lockstep supports CPU tensors, not tensors on ",
                   tensor.device().str());
    parts.push_back(tensor.detach().coalesce());
  }
  own_ = add_along_tree(parts);
}

void SparseAllReduce::gather_shapes(CollectiveCall& call) {
  const auto ranks = static_cast<size_t>(call.size());
  Shape own = shape_of(own_);
  std::vector<Shape> shapes(ranks);
  std::vector<Block> receive;
  for (Shape& shape : shapes) receive.push_back({reinterpret_cast<char*>(&shape), sizeof shape});
  gather(call, {reinterpret_cast<char*>(&own), sizeof own}, std::move(receive));
  for (size_t rank = 1; rank < ranks; ++rank) {
    if (shapes[rank].matches(shapes[0])) continue;
    // Every rank compares the same shapes, and throws.
    throw MismatchError(
        call.group().format_rank(call.rank()) + ": the ranks of group " + call.group().info().name +
        " disagree in all_reduce of a sparse tensor: " + call.group().format_rank(0) + " has " +
        shapes[0].format() + "; " + call.group().format_rank(static_cast<int>(rank)) + " has " +
        shapes[rank].format());
  }
  for (const Shape& shape : shapes) counts_.push_back(shape.count);
}

void SparseAllReduce::gather_indices(CollectiveCall& call) {
  const at::Tensor own = own_.indices().contiguous();
  std::vector<Block> receive;
  for (int64_t count : counts_) {
    indices_.push_back(at::empty({own_.sparse_dim(), count}, own.options()));
    receive.push_back(block_of(indices_.back()));
  }
  gather(call, block_of(own), std::move(receive));
}

void SparseAllReduce::gather_values(CollectiveCall& call) {
  const at::Tensor own = own_.values().resolve_conj().resolve_neg().contiguous();
  std::vector<Block> receive;
  for (int64_t count : counts_) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes[0] = count;
    values_.push_back(at::empty(sizes, own.options().memory_format(std::nullopt)));
    receive.push_back(block_of(values_.back()));
  }
  gather(call, block_of(own), std::move(receive));
}

void SparseAllReduce::write_sum() {
  const at::ScalarType type = own_.scalar_type();
  const at::ScalarType wide = type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
  std::vector<at::Tensor> parts;
  for (size_t rank = 0; rank < counts_.size(); ++rank)
    parts.push_back(at::_sparse_coo_tensor_unsafe(indices_[rank], values_[rank].to(wide),
                                                  own_.sizes(), own_.options().dtype(wide),
                                                  /*is_coalesced=*/true));
  const at::Tensor sum = add_along_tree(parts).to(type);
  for (at::Tensor& tensor : tensors_) tensor.copy_(sum);
}

}  // namespace lockstep
