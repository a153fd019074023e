// scaled_dot_product_attention in float32 and float64: softmax(scale * query key' + mask) value.
//
// torch's kernel calls MKL for its products, which takes two to three times as long where MKL has
// to compute the same bits on every processor. This one calls the products of gemm.h and the rows
// of softmax.h, for a head and a block of its queries at a time, whose scores are in the cache:
//
//     scores (queries, keys)     of the keys that the queries see
//     weights                    softmax of each row
//     output                     weights x value
//
// The backward pass computes the weights again, from the sums that the forward pass has found.
// Gradients of keys and values are sums over all queries in order, which continue from block to
// block. So no bit depends on the size of a block, or on other heads.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "portable_kernels.h"
#include "tensors.h"

namespace lockstep {
namespace {

using at::Tensor;

// torch divides heads among threads; the products of a single one would be divided instead.
bool has_one_head(const Tensor& query) {
  return query.dim() < 2 || query.size(0) * query.size(1) <= 1;
}

constexpr int64_t kQueries = 128, kCausalQueries = 64;  // of a block, at most
constexpr int64_t kFewQueries = 16;                     // of a block, at least
constexpr int64_t kScores = 1 << 17;                    // of a block, about
constexpr int kScoreScratch = 4, kGradientScratch = 5;

// The inputs: (samples, heads, queries or keys, size of a head).
struct Attention {
  Tensor query, key, value;
  std::optional<Tensor> mask;  // (samples, heads, queries, keys)
  bool is_causal;
  double scale;

  int64_t heads() const { return query.size(0) * query.size(1); }
  int64_t queries() const { return query.size(2); }
  int64_t keys() const { return key.size(2); }
  int64_t size() const { return query.size(3); }
  int64_t block_queries() const {
    const int64_t fitting = std::max(kScores / keys(), kFewQueries);
    return std::min({queries(), fitting, is_causal ? kCausalQueries : kQueries});
  }
  int64_t blocks() const { return (queries() + block_queries() - 1) / block_queries(); }
};

// A head of a tensor, from a row on.
Operand take_head(const Tensor& tensor, int64_t head, int64_t row = 0) {
  const int64_t heads = tensor.size(1);
  const int64_t place =
      head / heads * tensor.stride(0) + head % heads * tensor.stride(1) + row * tensor.stride(2);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  return {data + place * tensor.element_size(), tensor.stride(2),
          tensor.dim() > 3 ? tensor.stride(3) : 1};
}

Operand transpose(const Operand& operand) {
  return {operand.data, operand.column_stride, operand.row_stride};
}

void* writable(const Operand& operand) { return const_cast<void*>(operand.data); }

// Some queries of a head, and their scores.
class QueryBlock {
 public:
  QueryBlock(const Attention& inputs, int64_t head, int64_t number)
      : inputs_(inputs),
        head_(head),
        query_(number * inputs.block_queries()),
        queries_(std::min(inputs.block_queries(), inputs.queries() - query_)),
        keys_(inputs.is_causal ? std::min(query_ + queries_, inputs.keys()) : inputs.keys()),
        rows_{inputs.query.scalar_type() == at::kDouble,
              queries_,
              keys_,
              inputs.is_causal ? query_ + 1 : keys_,
              inputs.scale,
              nullptr,
              0,
              0} {
    if (!inputs.mask) return;
    const Operand mask = take_head(*inputs.mask, head, query_);
    rows_.mask = mask.data;
    rows_.mask_row_stride = mask.row_stride;
    rows_.mask_column_stride = mask.column_stride;
  }

  // Writes the output and the sums.
  void attend(const Tensor& output, const Tensor& sums) const {
    const Operand scores = multiply_queries();
    const Operand of_sums = take_head(sums, head_, query_);
    portable_gemm().softmax.normalize(rows_, writable(scores), writable(of_sums),
                                      of_sums.row_stride);
    multiply(queries_, inputs_.size(), keys_, scores, take_head(inputs_.value, head_),
             take_head(output, head_, query_));
  }

  // Writes the gradient of these queries, and adds to those of the keys and values.
  void differentiate(const Tensor& of_output, const Tensor& sums,
                     const std::array<Tensor, 3>& results) const {
    const Operand weights = multiply_queries(), of_sums = take_head(sums, head_, query_);
    const Operand gradient = take_head(of_output, head_, query_);
    portable_gemm().softmax.restore(rows_, writable(weights), of_sums.data, of_sums.row_stride);
    const bool continues = query_ > 0;
    multiply(keys_, inputs_.size(), queries_, transpose(weights), gradient,
             take_head(results[2], head_), continues);
    const Operand scores = make_scores(kGradientScratch);
    multiply(queries_, keys_, inputs_.size(), gradient, transpose(take_head(inputs_.value, head_)),
             scores);
    portable_gemm().softmax.differentiate(rows_, weights.data, writable(scores));
    multiply(queries_, inputs_.size(), keys_, scores, take_head(inputs_.key, head_),
             take_head(results[0], head_, query_));
    multiply(keys_, inputs_.size(), queries_, transpose(scores),
             take_head(inputs_.query, head_, query_), take_head(results[1], head_), continues);
  }

 private:
  void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b,
                const Operand& result, bool continues = false) const {
    Product product{data_type_of(inputs_.query.scalar_type()), m, n, k, a, b, {}, result, 1, 0};
    product.continues = continues;
    portable_gemm().multiply(product);
  }

  Operand make_scores(int use) const {
    return {get_scratch(use, queries_ * keys_ * inputs_.query.element_size()), keys_, 1};
  }

  Operand multiply_queries() const {
    const Operand scores = make_scores(kScoreScratch);
    multiply(queries_, keys_, inputs_.size(), take_head(inputs_.query, head_, query_),
             transpose(take_head(inputs_.key, head_)), scores);
    return scores;
  }

  const Attention& inputs_;
  const int64_t head_, query_, queries_;
  const int64_t keys_;  // that the queries see
  ScoreRows rows_;
};

bool is_covered(const Attention& inputs) {
  const at::ScalarType type = inputs.query.scalar_type();
  const auto is_plain = [type](const Tensor& tensor) {
    return tensor.scalar_type() == type && tensor.dim() == 4 && tensor.numel() > 0 &&
           tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_neg();
  };
  return (type == at::kFloat || type == at::kDouble) && is_plain(inputs.query) &&
         is_plain(inputs.key) && is_plain(inputs.value) &&
         inputs.key.sizes() == inputs.value.sizes() &&
         inputs.query.sizes().slice(0, 2) == inputs.key.sizes().slice(0, 2) &&
         inputs.query.size(3) == inputs.key.size(3) &&
         (!inputs.mask || (inputs.mask->scalar_type() == type && !inputs.mask->is_neg() &&
                           (inputs.mask->dim() == 2 || inputs.mask->dim() == 4)));
}

std::optional<Attention> find_inputs(const Tensor& query, const Tensor& key, const Tensor& value,
                                     double dropout, bool is_causal,
                                     const std::optional<Tensor>& mask,
                                     std::optional<double> scale) {
  Attention inputs{query,     key,
                   value,     std::nullopt,
                   is_causal, scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))))};
  if (mask && mask->defined()) inputs.mask = *mask;
  if (dropout != 0 || !is_covered(inputs)) return std::nullopt;
  if (inputs.mask)
    inputs.mask =
        inputs.mask->expand({query.size(0), query.size(1), inputs.queries(), inputs.keys()});
  return inputs;
}

// Returns a tensor with the heads of a token side by side, as torch's kernel returns gradients.
Tensor make_with_heads_inside(const Tensor& like, int64_t size) {
  return at::empty({like.size(0), like.size(2), like.size(1), size}, like.options())
      .transpose(1, 2);
}

// The heads for which a thread is worth starting.
int64_t find_grain(const Attention& inputs, int64_t tasks) {
  const int64_t work = inputs.heads() * inputs.queries() * inputs.keys() * inputs.size();
  return std::max<int64_t>(1, kParallelWork / std::max<int64_t>(1, work / tasks));
}

std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  double dropout, bool is_causal, const std::optional<Tensor>& mask,
                                  std::optional<double> scale) {
  const auto inputs = find_inputs(query, key, value, dropout, is_causal, mask, scale);
  if (!inputs) {
    const OneThread guard(has_one_head(query));
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                is_causal, mask, scale);
  }
  const Tensor output = at::empty_like(query), sums = make_with_heads_inside(query, 1);
  const int64_t blocks = inputs->blocks(), tasks = inputs->heads() * blocks;
  run_parallel(tasks, find_grain(*inputs, tasks), [&](int64_t task) {
    QueryBlock(*inputs, task / blocks, task % blocks).attend(output, sums);
  });
  return {output, sums.squeeze(3)};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& gradient, const Tensor& query,
                                                   const Tensor& key, const Tensor& value,
                                                   const Tensor& output, const Tensor& sums,
                                                   double dropout, bool is_causal,
                                                   const std::optional<Tensor>& mask,
                                                   std::optional<double> scale) {
  const auto inputs = find_inputs(query, key, value, dropout, is_causal, mask, scale);
  if (!inputs || gradient.scalar_type() != query.scalar_type()) {
    const OneThread guard(has_one_head(query));
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, dropout, is_causal, mask, scale);
  }
  std::array<Tensor, 3> results;  // the gradients of query, key and value
  const std::array<Tensor, 3> inputs_of{query, key, value};
  for (size_t i = 0; i < results.size(); ++i)
    results[i] = make_with_heads_inside(inputs_of[i], query.size(3));
  // The first queries do not see all keys.
  if (is_causal)
    for (size_t i = 1; i < results.size(); ++i) results[i].zero_();
  run_parallel(inputs->heads(), find_grain(*inputs, inputs->heads()), [&](int64_t head) {
    for (int64_t number = 0; number < inputs->blocks(); ++number)
      QueryBlock(*inputs, head, number).differentiate(gradient, sums, results);
  });
  return {results[0], results[1], results[2]};
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &attend);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &attend_backward);
}

}  // namespace lockstep
