// lstm, of tensors that are not packed.
//
// torch calls oneDNN for it in float32 on every processor, and in bfloat16 on those that have the
// instructions. Its bits depend on the processor, and with ONEDNN_MAX_CPU_ISA=AVX2 it has no kernel
// for bfloat16. Without oneDNN torch computes a layer by linear products, which are portable, and
// elementwise functions, as it does for packed sequences, projections, RNN and GRU. That takes
// three times as long in float32, so oneDNN's kernel stays unless portable bits are asked for by
// name.
#include <ATen/CompositeImplicitAutogradFunctions.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include <optional>

#include "portable_kernels.h"

namespace lockstep {
namespace {

using at::Tensor;

// The setting belongs to the process, so a convolution that another thread computes meanwhile would
// be computed without oneDNN. Ranks compute in one thread.
struct WithoutOneDnn {
  const bool was_enabled = at::globalContext().userEnabledMkldnn();
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(was_enabled); }
  WithoutOneDnn(const WithoutOneDnn&) = delete;
  WithoutOneDnn& operator=(const WithoutOneDnn&) = delete;
};

bool keeps_onednn = false;

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, at::TensorList states,
                                        at::TensorList parameters, bool has_biases, int64_t layers,
                                        double dropout, bool train, bool bidirectional,
                                        bool batch_first) {
  std::optional<WithoutOneDnn> guard;
  if (!keeps_onednn || input.scalar_type() != at::kFloat) guard.emplace();
  return at::compositeimplicitautograd::lstm(input, states, parameters, has_biases, layers, dropout,
                                             train, bidirectional, batch_first);
}

}  // namespace

void register_recurrent(torch::Library& library, bool keeps_lstm) {
  keeps_onednn = keeps_lstm;
  library.impl("lstm.input", &lstm);
}

}  // namespace lockstep
