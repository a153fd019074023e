// Replaces the CPU kernels of torch's matrix products and convolutions by those of gemm.h, and
// those of elementwise functions that depend on the vendor of the processor.
//
// torch's call MKL or oneDNN, whose bits depend on the processor and on the number of threads.
// Everything above a kernel stays: autograd, autocast, vmap, the composite operators (linear,
// matmul, einsum, conv2d) that end in these. Other operators whose bits depend on the number of
// threads are called with one, or in pieces.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gemm.h"

namespace at {
class Tensor;
}
namespace c10 {
struct IValue;
}
namespace torch {
class Library;
}

namespace lockstep {

// Replaces the kernels in this process, or restores torch's. `kernels` names a set of gemm.h; ""
// is the fastest. Not while another thread computes products.
void use_portable_kernels(bool enabled, const std::string& kernels);

// The set in use.
const Gemm& portable_gemm();

constexpr int64_t kParallelWork = 1 << 17;  // multiply-adds for which a thread is worth starting

// Calls body(i) for i in 0 .. count-1 on torch's threads, each at least `grain` times.
void run_parallel(int64_t count, int64_t grain, const std::function<void(int64_t)>& body);

// Lets torch compute in one thread while it exists, on the thread that creates it, if it applies.
class OneThread {
 public:
  explicit OneThread(bool applies = true);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int threads_;
};

// Notes that an operator computes other bits on another processor.
void note_unportable(const std::string& name);
// Returns what was noted since the last call, in alphabetical order.
std::vector<std::string> take_unportable();
// Notes that matrices in bfloat16 were multiplied, for which a processor may have instructions that
// compute other bits. Returns whether they were since the last call.
void note_bfloat16();
bool take_bfloat16();

// Returns the sum along the tree of a b for each of some segments of k, of equal length; undefined
// for types and layouts that are not covered.
//
//     a (m, k) x b (k, n):    (a0 b0 + a1 b1) + (a2 b2 + a3 b3)
at::Tensor try_multiply_segments(const at::Tensor& a, const at::Tensor& b, int64_t segments);
// Returns what mkldnn_rnn_layer_backward returns for these arguments, with gradients of parameters
// that are sums along the tree of those of segments of the batch; empty if this is not possible.
std::vector<at::Tensor> try_lstm_segments(const c10::IValue* arguments, int64_t segments);

// Returns what convolution_backward returns for these arguments, with a gradient of the weight that
// is the sum along the tree of those of segments of the batch, and without that of the bias; empty
// if this is not possible.
std::vector<at::Tensor> try_convolution_segments(const c10::IValue* arguments, int64_t segments);

// Returns what native_layer_norm_backward returns for these arguments, with gradients of weight and
// bias that are sums along the tree of those of segments of the rows; empty if this is not
// possible.
std::vector<at::Tensor> try_layer_norm_segments(const c10::IValue* arguments, int64_t segments);

void register_products(torch::Library& library);
void register_convolutions(torch::Library& library);
void register_attention(torch::Library& library);
void register_functions(torch::Library& library);
void register_pooling(torch::Library& library);
void register_threads(torch::Library& library);
// `composite`: above autograd.
void register_recurrent(torch::Library& library, torch::Library& composite);

}  // namespace lockstep
