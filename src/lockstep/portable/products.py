"""Kernels for CPUs whose bits depend on nothing but the operands.

torch's kernels call MKL or oneDNN, whose bits depend on the processor and on the number of threads.
The native module replaces them by its own (`csrc/core/gemm.h`):

| operators | dtypes |
|---|---|
| `mm`, `bmm`, `addmm`, `baddbmm`, `addmv` in all forms | float32, float64, bfloat16 |
| `convolution`, `convolution_backward`: 2D, not transposed, one group | float32, float64 |
| the same in all forms: in float32, and rounded once | bfloat16, float16 |
| `max_pool2d_with_indices`, contiguous: torch's bits, faster | float32 |
| `sqrt`, `asin`, `acos`, `atan`, `tan`, `pow(x, 0.5)` | float32, float64 |
| `lstm`, of sequences that are not packed | float32; without oneDNN in 16-bit types |
| those whose bits depend on the number of threads: in pieces, or on one thread | all |

`linear`, `matmul`, `einsum` and `conv2d` end in these operators; autograd and autocast are above
them.
"""

from __future__ import annotations

from lockstep.comm.native_module import load_native, reason_unavailable
from lockstep.kernel.errors import UsageError

__all__ = ["use_portable_products"]


def use_portable_products(enabled: bool = True) -> None:
    """Replace torch's kernels in this process; a fork inherits them.

    Args:
        enabled: False restores the kernels of torch.

    Raises:
        UsageError: This process cannot load the native module.
    """
    reason = reason_unavailable()
    if reason is not None:
        raise UsageError(
            "portable mode needs the compiled backend for its matrix products, which is not "
            f"available: {reason}"
        )
    load_native().use_portable_kernels(enabled)
