// scaled_dot_product_attention in float32 and float64: softmax(scale * query key' + mask) value.
//
// torch's kernel calls MKL for its products, which takes two to three times as long where MKL has
// to compute the same bits on every processor. This one calls the products of gemm.h, for a block
// of queries at a time, whose scores are in the cache:
//
//     scores (queries, keys)     of the keys that the queries see
//     weights                    softmax of each row
//     output                     weights x value
//
// Sizes of blocks depend on the shape of one head only, so its bits do not depend on the others.
// The backward pass computes the weights again. Gradients of keys and values are added block by
// block, in the order of the queries.
#include <ATen/CPUFunctions.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "portable_kernels.h"

namespace lockstep {
namespace {

using at::Tensor;

// torch divides heads among threads; the products of a single one would be divided instead.
class OneThreadForOneHead {
 public:
  explicit OneThreadForOneHead(const Tensor& query) {
    if (query.dim() < 2 || query.size(0) * query.size(1) <= 1) guard_.emplace();
  }

 private:
  std::optional<OneThread> guard_;
};

constexpr int64_t kQueries = 128, kCausalQueries = 64;  // of a block, at most
constexpr int64_t kFewQueries = 16;                     // of a block, at least
constexpr int64_t kVector = 16;                         // numbers, in whole vectors
constexpr int64_t kScores = 1 << 17;                    // that are computed at once
constexpr double kHidden = -std::numeric_limits<double>::infinity();

// The inputs: (samples, heads, queries or keys, size of a head).
struct Attention {
  Tensor query, key, value;
  std::optional<Tensor> mask;  // (samples, heads, queries, keys)
  bool is_causal;
  double scale;

  int64_t samples() const { return query.size(0); }
  int64_t heads() const { return query.size(1); }
  int64_t queries() const { return query.size(2); }
  int64_t keys() const { return key.size(2); }

  // Of a block, at most.
  int64_t block_queries() const {
    const int64_t fitting = std::max(kScores / keys(), kFewQueries);
    return std::min({queries(), fitting, is_causal ? kCausalQueries : kQueries});
  }
  int64_t block_heads() const {
    return std::clamp<int64_t>(kScores / (block_queries() * keys()), 1, heads());
  }
  int64_t block_samples() const {
    const int64_t together = kScores / (block_queries() * keys() * heads());
    return std::clamp<int64_t>(together, 1, samples());
  }
  // Several samples of a block have to be side by side in memory.
  bool needs_contiguous() const { return block_samples() > 1; }
};

// Some heads of a sample, or all of several samples; and some of their queries.
struct QueryBlock {
  int64_t sample, samples, head, heads, query, queries;
  int64_t keys;  // that the queries see

  Tensor of_heads(const Tensor& tensor) const {
    return tensor.narrow(0, sample, samples).narrow(1, head, heads);
  }
  Tensor take_heads(const Tensor& tensor) const {
    const Tensor taken = of_heads(tensor);
    return samples == 1 ? taken.squeeze(0) : taken.flatten(0, 1);
  }
  Tensor take_queries(const Tensor& tensor) const {
    return take_heads(tensor).narrow(1, query, queries);
  }
  Tensor take_keys(const Tensor& tensor) const { return take_heads(tensor).narrow(1, 0, keys); }
};

template <typename Body>
void for_each_block(const Attention& inputs, const Body& body) {
  const int64_t rows = inputs.block_queries(), heads = inputs.block_heads(),
                samples = inputs.block_samples();
  for (int64_t sample = 0; sample < inputs.samples(); sample += samples)
    for (int64_t head = 0; head < inputs.heads(); head += heads)
      for (int64_t query = 0; query < inputs.queries(); query += rows) {
        const int64_t queries = std::min(rows, inputs.queries() - query);
        body(QueryBlock{
            sample, std::min(samples, inputs.samples() - sample), head,
            std::min(heads, inputs.heads() - head), query, queries,
            inputs.is_causal ? std::min(query + queries, inputs.keys()) : inputs.keys()});
      }
}

// The scores of a block.
Tensor find_scores(const Attention& inputs, const QueryBlock& block) {
  Tensor scores =
      at::empty({block.samples * block.heads, block.queries, block.keys}, inputs.query.options());
  at::bmm_out(scores, block.take_queries(inputs.query).mul(inputs.scale),
              block.take_keys(inputs.key).transpose(1, 2));
  if (inputs.mask)
    scores.view({block.samples, block.heads, block.queries, block.keys})
        .add_(block.of_heads(*inputs.mask)
                  .narrow(2, block.query, block.queries)
                  .narrow(3, 0, block.keys));
  if (inputs.is_causal && block.keys > block.query) {
    const int64_t columns = block.keys - block.query;  // those of the diagonal
    const Tensor hidden =
        at::ones({block.queries, columns}, inputs.query.options().dtype(at::kBool)).triu_(1);
    scores.narrow(2, block.query, columns).masked_fill_(hidden, kHidden);
  }
  return scores;
}

// The weights of a block, a row of which torch's kernel computes by itself. `largest` is the
// largest score of each query.
Tensor find_weights(const Tensor& scores, const Tensor& largest) {
  Tensor weights = at::_softmax(scores, 2, false);
  const Tensor is_blind = largest == kHidden;  // the query sees nothing, and has no weights
  if (is_blind.any().item<bool>()) weights.masked_fill_(is_blind, 0);
  return weights;
}

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
  if (inputs.needs_contiguous()) {
    inputs.query = query.contiguous();
    inputs.key = key.contiguous();
    inputs.value = value.contiguous();
  }
  if (inputs.mask)
    inputs.mask =
        inputs.mask->expand({inputs.samples(), inputs.heads(), inputs.queries(), inputs.keys()});
  return inputs;
}

// Returns a tensor with the heads of a token side by side, as torch's kernel returns gradients.
Tensor make_with_heads_inside(const Tensor& like, int64_t size) {
  return at::empty({like.size(0), like.size(2), like.size(1), size}, like.options())
      .transpose(1, 2);
}

// Returns a tensor in which the results of blocks are written instead of `result`.
Tensor make_place(const Attention& inputs, const Tensor& result) {
  return inputs.needs_contiguous() && !result.is_contiguous()
             ? at::empty(result.sizes(), result.options())
             : result;
}

// Returns a result with what was written.
Tensor finish(const Tensor& result, const Tensor& place) {
  return result.is_same(place) ? result : result.copy_(place);
}

std::tuple<Tensor, Tensor> attend(const Tensor& query, const Tensor& key, const Tensor& value,
                                  double dropout, bool is_causal, const std::optional<Tensor>& mask,
                                  std::optional<double> scale) {
  const auto inputs = find_inputs(query, key, value, dropout, is_causal, mask, scale);
  if (!inputs) {
    const OneThreadForOneHead guard(query);
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                is_causal, mask, scale);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Tensor output = at::empty_like(query), of_output = make_place(*inputs, output);
  const Tensor sums = make_with_heads_inside(query, 1), of_sums = make_place(*inputs, sums);
  for_each_block(*inputs, [&](const QueryBlock& block) {
    const Tensor scores = find_scores(*inputs, block);
    const Tensor largest = at::amax(scores, {2}, true);
    const Tensor weights = find_weights(scores, largest);
    Tensor place = block.take_queries(of_output);
    at::bmm_out(place, weights, block.take_keys(inputs->value));
    // The largest weight is 1 / sum. Of whole vectors, so that no logarithm depends on its place.
    const int64_t count = largest.numel();
    const Tensor logarithms =
        at::ones({(count + kVector - 1) / kVector * kVector}, largest.options());
    Tensor peaks = logarithms.narrow(0, 0, count).view(largest.sizes());
    at::amax_out(peaks, weights, {2}, true);
    logarithms.log_();
    Tensor found = largest - peaks;
    found.masked_fill_(largest == kHidden, 0);
    block.take_queries(of_sums).copy_(found);
  });
  return {finish(output, of_output), finish(sums, of_sums).squeeze(3)};
}

// Adds to the gradients of the keys or values what the queries of a block contribute.
void add_product(const Attention& inputs, const QueryBlock& block, const Tensor& weights,
                 const Tensor& of_queries, const Tensor& sums) {
  Tensor place = block.take_keys(sums);
  if (block.query == 0 && block.keys == inputs.keys())
    at::bmm_out(place, weights.transpose(1, 2), of_queries);
  else
    place.baddbmm_(weights.transpose(1, 2), of_queries);
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& gradient, const Tensor& query,
                                                   const Tensor& key, const Tensor& value,
                                                   const Tensor& output, const Tensor& sums,
                                                   double dropout, bool is_causal,
                                                   const std::optional<Tensor>& mask,
                                                   std::optional<double> scale) {
  const auto inputs = find_inputs(query, key, value, dropout, is_causal, mask, scale);
  if (!inputs || gradient.scalar_type() != query.scalar_type()) {
    const OneThreadForOneHead guard(query);
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, sums, dropout, is_causal, mask, scale);
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Tensor of_output = inputs->needs_contiguous() ? gradient.contiguous() : gradient;
  std::array<Tensor, 3> results, places;  // the gradients of query, key and value
  const std::array<Tensor, 3> inputs_of{query, key, value};
  for (size_t i = 0; i < results.size(); ++i) {
    results[i] = make_with_heads_inside(inputs_of[i], query.size(3));
    places[i] = make_place(*inputs, results[i]);
  }
  const auto& [of_query, of_key, of_value] = places;
  if (is_causal) {  // otherwise the first block of queries writes all of them
    of_key.zero_();
    of_value.zero_();
  }
  for_each_block(*inputs, [&](const QueryBlock& block) {
    const Tensor scores = find_scores(*inputs, block);
    const Tensor weights = find_weights(scores, at::amax(scores, {2}, true));
    const Tensor of_block = block.take_queries(of_output);
    add_product(*inputs, block, weights, of_block, of_value);
    const Tensor of_weights = at::bmm(of_block, block.take_keys(inputs->value).transpose(1, 2));
    Tensor of_scores = at::_softmax_backward_data(of_weights, weights, 2, weights.scalar_type());
    of_scores.mul_(inputs->scale);
    Tensor place = block.take_queries(of_query);
    at::bmm_out(place, of_scores, block.take_keys(inputs->key));
    add_product(*inputs, block, of_scores, block.take_queries(inputs->query), of_key);
  });
  return {finish(results[0], of_query), finish(results[1], of_key), finish(results[2], of_value)};
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &attend);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &attend_backward);
}

}  // namespace lockstep
