// The backward pass of layer norm for several micro-batches, in one call.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include <algorithm>
#include <vector>

#include "portable_kernels.h"
#include "segment_sums.h"

namespace lockstep {

constexpr int64_t kNormColumns = 64;  // that a thread computes at once

static bool is_contiguous_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() && tensor.is_contiguous();
}

std::vector<at::Tensor> try_layer_norm_segments(const c10::IValue* arguments, int64_t segments) {
  const at::Tensor &gradient = arguments[0].toTensor(), &input = arguments[1].toTensor();
  const at::Tensor &means = arguments[3].toTensor(), &inverses = arguments[4].toTensor();
  const auto weight = arguments[5].toOptional<at::Tensor>();
  const auto bias = arguments[6].toOptional<at::Tensor>();
  const std::vector<int64_t> shape = arguments[2].toIntVector();
  const c10::List<bool> mask = arguments[7].toBoolList();
  std::vector<at::Tensor> all = {gradient, input, means, inverses};
  if (weight) all.push_back(*weight);
  if (bias) all.push_back(*bias);
  const int64_t columns = c10::multiply_integers(shape), rows = means.numel();
  if (!std::all_of(all.begin(), all.end(), is_contiguous_float) ||
      rows * columns != input.numel() || input.numel() == 0 || rows % segments)
    return {};
  std::vector<at::Tensor> results(3);
  if (mask[0])
    results[0] = std::get<0>(at::native_layer_norm_backward(gradient, input, shape, means, inverses,
                                                            weight, bias, {true, false, false}));
  const auto allocate = [](const std::optional<at::Tensor>& like, bool is_needed) {
    return like && is_needed ? at::empty_like(*like) : at::Tensor();
  };
  results[1] = allocate(weight, mask[1]);
  results[2] = allocate(bias, mask[2]);
  const auto find_memory = [](const at::Tensor& result) {
    return result.defined() ? result.mutable_data_ptr<float>() : nullptr;
  };
  float *const of_weight = find_memory(results[1]), *const of_bias = find_memory(results[2]);
  if (!of_weight && !of_bias) return results;
  const int64_t each = rows / segments, blocks = (columns + kNormColumns - 1) / kNormColumns;
  run_parallel(blocks, std::max<int64_t>(1, at::internal::GRAIN_SIZE / (rows * kNormColumns)),
               [&](int64_t block) {
                 const int64_t first = block * kNormColumns,
                               width = std::min(kNormColumns, columns - first);
                 // Two rows for each block that waits: gradients of the weight, and of the bias.
                 std::vector<float> sums((1 + count_waiting(segments)) * 2 * width);
                 sum_segments(segments, 2, width, sums.data(), width, sums.data() + 2 * width,
                              [&](int64_t segment, float* place, int64_t) {
                                std::fill(place, place + 2 * width, 0.0F);
                                const int64_t begin = segment * each, at = begin * columns + first;
                                portable_gemm().add_norm_rows(
                                    {each, width, columns, gradient.const_data_ptr<float>() + at,
                                     input.const_data_ptr<float>() + at,
                                     means.const_data_ptr<float>() + begin,
                                     inverses.const_data_ptr<float>() + begin},
                                    of_weight ? place : nullptr, of_bias ? place + width : nullptr);
                              });
                 if (of_weight) std::copy_n(sums.data(), width, of_weight + first);
                 if (of_bias) std::copy_n(sums.data() + width, width, of_bias + first);
               });
  return results;
}

}  // namespace lockstep
