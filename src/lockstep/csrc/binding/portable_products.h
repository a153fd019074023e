// Replaces the CPU kernels of torch's matrix products by those of gemm.h.
//
// torch's call MKL or oneDNN, whose bits depend on the processor and on the number of threads.
// Everything above a kernel stays: autograd, autocast, vmap, the composite operators (linear,
// matmul, einsum) that end in these.
#pragma once

#include <string>

namespace lockstep {

// Replaces the kernels in this process, or restores torch's. `kernels` names a set of gemm.h; ""
// is the fastest. Not while another thread computes products.
void use_portable_products(bool enabled, const std::string& kernels);

}  // namespace lockstep
