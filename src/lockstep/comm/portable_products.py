"""Matrix products on CPUs whose bits depend on nothing but the operands.

The kernels of torch's `mm`, `bmm`, `addmm`, `baddbmm` and `addmv` call MKL or oneDNN, whose bits
depend on the processor and on the number of threads. The native module replaces them by its own
(`csrc/core/gemm.h`), for float32, float64 and bfloat16. `linear`, `matmul` and `einsum` end in
these operators; autograd and autocast are above them.
"""

from __future__ import annotations

from lockstep.comm import native_module
from lockstep.kernel.errors import UsageError

__all__ = ["use_portable_products"]


def use_portable_products(enabled: bool = True) -> None:
    """Replace the kernels of torch's matrix products in this process; a fork inherits them.

    Args:
        enabled: False restores the kernels of torch.

    Raises:
        UsageError: This process cannot load the native module.
    """
    reason = native_module.reason_unavailable()
    if reason is not None:
        raise UsageError(
            "portable mode needs the compiled backend for its matrix products, which is not "
            f"available: {reason}"
        )
    native_module.load().use_portable_products(enabled)
