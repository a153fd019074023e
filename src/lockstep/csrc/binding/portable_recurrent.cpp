// The layers of an LSTM, of tensors that are not packed.
//
// In float32, torch calls oneDNN for each layer and direction. Its bits depend on the processor,
// and on the number of threads. This computes the same operator by the products of gemm.h and the
// cells of lstm_cell.h. Each thread takes some rows of the batch through all steps:
//
//     gates (steps, rows, 4 hidden)   input x w_ih' + biases, of all steps together
//     for each step                   gates += output of the step before x w_hh', and the cells
//
// The backward pass goes through the steps in reverse order. Gradients of parameters are products
// over the rows of all steps, in the order of the steps.
//
// In 16-bit types torch composes a layer of linear products, which are portable, and elementwise
// functions, as it does for packed sequences, projections, float64, GRU and RNN. So that it does
// this also on processors that have instructions for them, oneDNN is switched off meanwhile.
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mkldnn_rnn_layer_backward_cpu_dispatch.h>
#include <ATen/ops/mkldnn_rnn_layer_cpu_dispatch.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "portable_kernels.h"

namespace lockstep {
namespace {

using at::Tensor;

constexpr int64_t kLstm = 2;    // torch's number of this kind of layer
constexpr int64_t kStates = 6;  // of a cell: i, f, g, o, cell, tanh(cell)
constexpr int64_t kFewRows = 4;

// The setting belongs to the process, so a convolution that another thread computes meanwhile would
// be computed without oneDNN. Ranks compute in one thread.
struct WithoutOneDnn {
  const bool was_enabled = at::globalContext().userEnabledMkldnn();
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(was_enabled); }
  WithoutOneDnn(const WithoutOneDnn&) = delete;
  WithoutOneDnn& operator=(const WithoutOneDnn&) = delete;
};

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, at::TensorList states,
                                        at::TensorList parameters, bool has_biases, int64_t layers,
                                        double dropout, bool train, bool bidirectional,
                                        bool batch_first) {
  std::optional<WithoutOneDnn> guard;
  if (input.scalar_type() != at::kFloat || at::autocast::is_autocast_enabled(at::kCPU))
    guard.emplace();
  return at::compositeimplicitautograd::lstm(input, states, parameters, has_biases, layers, dropout,
                                             train, bidirectional, batch_first);
}

// A layer in one direction.
struct Layer {
  int64_t steps, rows, hidden;
  bool is_reverse;

  // The number of the step that is computed as number `n`.
  int64_t step(int64_t n) const { return is_reverse ? steps - 1 - n : n; }

  // Calls body(row, rows) for the rows of each thread.
  template <typename Body>
  void for_each_part(const Body& body) const {
    const int64_t work = steps * rows * hidden * 4 * hidden;
    const int64_t parts = std::clamp<int64_t>(work / kParallelWork, 1, at::get_num_threads());
    const int64_t size = std::max((rows + parts - 1) / parts, kFewRows);
    run_parallel((rows + size - 1) / size, 1,
                 [&](int64_t part) { body(part * size, std::min(size, rows - part * size)); });
  }
};

bool is_covered(int64_t mode, std::initializer_list<Tensor> tensors) {
  return mode == kLstm && std::all_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) {
           return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() &&
                  tensor.layout() == at::kStrided && tensor.numel() > 0 && !tensor.is_neg();
         });
}

// result (rows, n) = a (rows, k) b (k, n), or its sums continue with these terms.
void multiply(int64_t rows, int64_t n, int64_t k, const float* a, const float* b, float* result,
              int64_t result_pitch, bool continues) {
  Product product{
      DataType::f32, rows, n, k, {a, k, 1}, {b, n, 1}, {}, {result, result_pitch, 1}, 1, 0};
  product.continues = continues;
  portable_gemm().multiply(product);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> compute_layer(
    const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih,
    const Tensor& b_hh, const Tensor& hidden_before, const Tensor& cell_before, bool is_reverse,
    at::IntArrayRef batch_sizes, int64_t mode, int64_t hidden_size, int64_t layers, bool has_biases,
    bool bidirectional, bool batch_first, bool train) {
  if (!is_covered(mode, {input, w_ih, w_hh, hidden_before, cell_before}))
    return at::cpu::mkldnn_rnn_layer(input, w_ih, w_hh, b_ih, b_hh, hidden_before, cell_before,
                                     is_reverse, batch_sizes, mode, hidden_size, layers, has_biases,
                                     bidirectional, batch_first, train);
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Layer layer{input.size(0), input.size(1), hidden_size, is_reverse};
  const int64_t hidden = layer.hidden, pitch = kStates * hidden;
  const Tensor states = at::empty({layer.steps, layer.rows, pitch}, input.options());
  const Tensor output = at::empty({layer.steps, layer.rows, hidden}, input.options());
  Tensor gates = states.view({layer.steps * layer.rows, pitch}).narrow(1, 0, 4 * hidden);
  const Tensor rows = input.reshape({layer.steps * layer.rows, input.size(2)});
  if (has_biases)
    at::addmm_out(gates, b_ih + b_hh, rows, w_ih.t());
  else
    at::mm_out(gates, rows, w_ih.t());
  const Tensor weights = w_hh.t().contiguous();  // rows of a product, which are read in order
  const Tensor h0 = hidden_before.contiguous(), c0 = cell_before.contiguous();
  const auto* const first_h = h0.const_data_ptr<float>();
  const auto* const first_c = c0.const_data_ptr<float>();
  const auto* const factors = weights.const_data_ptr<float>();
  auto* const all_states = states.mutable_data_ptr<float>();
  auto* const outputs = output.mutable_data_ptr<float>();
  layer.for_each_part([&](int64_t row, int64_t count) {
    const float* h = first_h + row * hidden;
    const float* c = first_c + row * hidden;
    int64_t c_pitch = hidden;
    for (int64_t n = 0; n < layer.steps; ++n) {
      const int64_t place = layer.step(n) * layer.rows + row;
      float* const state = all_states + place * pitch;
      float* const out = outputs + place * hidden;
      multiply(count, 4 * hidden, hidden, h, factors, state, pitch, true);
      portable_gemm().lstm_cell.compute({count, hidden, state, pitch, c, c_pitch, out});
      h = out;
      c = state + 4 * hidden;
      c_pitch = pitch;
    }
  });
  const int64_t last = layer.step(layer.steps - 1);
  return {output, output.select(0, last).clone().view(hidden_before.sizes()),
          states.select(0, last).narrow(1, 4 * hidden, hidden).clone().view(cell_before.sizes()),
          at::GradMode::is_enabled() ? states : Tensor()};
}

// The rows of segments of a batch, those of each segment one after another.
Tensor order_by_segment(const Tensor& rows, int64_t segments) {
  const int64_t steps = rows.size(0), samples = rows.size(1) / segments, size = rows.size(2);
  return rows.reshape({steps, segments, samples, size})
      .transpose(0, 1)
      .reshape({segments * steps * samples, size});
}

std::vector<Tensor> differentiate(const Tensor& input, const Tensor& w_ih, const Tensor& w_hh,
                                  const Tensor& hidden_before, const Tensor& cell_before,
                                  const Tensor& output, const Tensor& of_output,
                                  const Tensor& of_hidden, const Tensor& of_cell, bool is_reverse,
                                  const Tensor& states, int64_t segments) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const Layer layer{input.size(0), input.size(1), w_hh.size(1), is_reverse};
  const int64_t hidden = layer.hidden, pitch = kStates * hidden;
  const auto make_own = [](const Tensor& given, const Tensor& like) {
    const Tensor own = at::empty_like(like, at::MemoryFormat::Contiguous);
    return given.defined() ? own.copy_(given) : own.zero_();
  };
  const Tensor of_h = make_own(of_hidden, hidden_before), of_c = make_own(of_cell, cell_before);
  const Tensor of_outputs = of_output.defined() ? of_output.contiguous() : at::zeros_like(output);
  const Tensor weights = w_hh.contiguous(), c0 = cell_before.contiguous();
  const Tensor gates = at::empty({layer.steps, layer.rows, 4 * hidden}, input.options());
  const auto* const all_states = states.const_data_ptr<float>();
  const auto* const first_c = c0.const_data_ptr<float>();
  const auto* const all_of_outputs = of_outputs.const_data_ptr<float>();
  const auto* const factors = weights.const_data_ptr<float>();
  auto* const all_of_h = of_h.mutable_data_ptr<float>();
  auto* const all_of_c = of_c.mutable_data_ptr<float>();
  auto* const all_gates = gates.mutable_data_ptr<float>();
  layer.for_each_part([&](int64_t row, int64_t count) {
    for (int64_t n = layer.steps - 1; n >= 0; --n) {
      const int64_t place = layer.step(n) * layer.rows + row;
      const float* before = first_c + row * hidden;
      if (n > 0) before = all_states + (layer.step(n - 1) * layer.rows + row) * pitch + 4 * hidden;
      float* const of_gates = all_gates + place * 4 * hidden;
      portable_gemm().lstm_cell.differentiate(
          {count, hidden, all_states + place * pitch, pitch, before, n > 0 ? pitch : hidden,
           all_of_outputs + place * hidden, hidden, all_of_h + row * hidden,
           all_of_c + row * hidden, of_gates});
      multiply(count, hidden, 4 * hidden, of_gates, factors, all_of_h + row * hidden, hidden,
               false);
    }
  });
  const Tensor first = hidden_before.reshape({1, layer.rows, hidden});
  const Tensor others = output.narrow(0, is_reverse ? 1 : 0, layer.steps - 1);
  const Tensor before = is_reverse ? at::cat({others, first}) : at::cat({first, others});
  const Tensor of_rows = order_by_segment(gates, segments);
  const Tensor ones = at::ones({1, of_rows.size(0)}, input.options());
  const auto add_segments = [&](const Tensor& a, const Tensor& b) {
    return segments == 1 ? at::mm(a, b) : try_multiply_segments(a, b, segments);
  };
  const Tensor of_bias = add_segments(ones, of_rows).squeeze(0);
  return {at::mm(gates.view({-1, 4 * hidden}), w_ih).view(input.sizes()),
          add_segments(of_rows.t(), order_by_segment(input, segments)),
          add_segments(of_rows.t(), order_by_segment(before, segments)),
          of_bias,
          of_bias.clone(),
          of_h,
          of_c};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> differentiate_layer(
    const Tensor& input, const Tensor& w_ih, const Tensor& w_hh, const Tensor& b_ih,
    const Tensor& b_hh, const Tensor& hidden_before, const Tensor& cell_before,
    const Tensor& output, const Tensor& hidden_after, const Tensor& cell_after,
    const std::optional<Tensor>& of_output, const std::optional<Tensor>& of_hidden,
    const std::optional<Tensor>& of_cell, bool is_reverse, int64_t mode, int64_t hidden_size,
    int64_t layers, bool has_biases, bool train, bool bidirectional, at::IntArrayRef batch_sizes,
    bool batch_first, const Tensor& states) {
  if (!is_covered(mode, {input, w_ih, w_hh, hidden_before, cell_before}))
    return at::cpu::mkldnn_rnn_layer_backward(
        input, w_ih, w_hh, b_ih, b_hh, hidden_before, cell_before, output, hidden_after, cell_after,
        of_output, of_hidden, of_cell, is_reverse, mode, hidden_size, layers, has_biases, train,
        bidirectional, batch_sizes, batch_first, states);
  const Tensor of_o = of_output.value_or(Tensor()), of_h = of_hidden.value_or(Tensor()),
               of_c = of_cell.value_or(Tensor());
  if (!of_o.defined() && !of_h.defined() && !of_c.defined()) return {};
  const std::vector<Tensor> results =
      differentiate(input, w_ih, w_hh, hidden_before, cell_before, output, of_o, of_h, of_c,
                    is_reverse, states, 1);
  return {results[0], results[1], results[2], results[3], results[4], results[5], results[6]};
}

}  // namespace

// The arguments are those of `differentiate_layer`.
std::vector<Tensor> try_lstm_segments(const c10::IValue* arguments, int64_t segments) {
  const auto take = [&](size_t position) {
    return arguments[position].isTensor() ? arguments[position].toTensor() : Tensor();
  };
  const Tensor input = take(0), w_ih = take(1), w_hh = take(2), hidden = take(5), cell = take(6);
  if (!is_covered(arguments[14].toInt(), {input, w_ih, w_hh, hidden, cell})) return {};
  return differentiate(input, w_ih, w_hh, hidden, cell, take(7), take(10), take(11), take(12),
                       arguments[13].toBool(), take(22), segments);
}

void register_recurrent(torch::Library& library, torch::Library& composite) {
  library.impl("mkldnn_rnn_layer", &compute_layer);
  library.impl("mkldnn_rnn_layer_backward", &differentiate_layer);
  composite.impl("lstm.input", &lstm);
}

}  // namespace lockstep
