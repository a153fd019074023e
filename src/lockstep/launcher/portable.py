"""Portable arithmetic: the same bits on every x86-64 processor with AVX2.

Each library reads its variable (`kernel_variables.py`) at its first computation. Torch's own
kernels and oneDNN then use AVX2, and MKL uses code that does not depend on the vendor of the
processor. The native module replaces matrix products, to make them fast, and the functions whose
bits depend on the processor nevertheless. The fingerprint of arithmetic shows whether a library had
chosen other kernels before: it must be the constant of this version of torch.

    python -m lockstep.launcher.portable      prints the constant that this machine computes
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from lockstep.comm.portable_products import use_portable_products
from lockstep.kernel.errors import UsageError
from lockstep.launcher.arithmetic import (
    declare_portable,
    has_portable_bits,
    measure_arithmetic,
)
from lockstep.launcher.arithmetic_difference import NOT_OF_TORCH, join, name_differences, parse
from lockstep.launcher.kernel_variables import (
    OF_TORCH,
    PORTABLE,
    find_missing_variables,
    is_portable_requested,
)
from lockstep.messages import log

__all__ = [
    "CONSTANTS",
    "choose_kernels",
    "measure_of_torch",
    "restore_kernels",
]

CONSTANTS = {
    "2.13": "matrix products=a02e39c9, convolutions=cdd6559d, attention=a5754839, "
    "softmax=a669741a, elementwise functions=bfdf692e, normalization=f77ce43d, "
    "reductions=7690fa89, random numbers=80839d00",
}
"""The fingerprint of portable arithmetic by the minor version of torch, without the families that
do not depend on torch alone."""


def choose_kernels(
    is_portable: bool | None, device: torch.device, set_variable: Callable[[str, str], None]
) -> None:
    """Choose the kernels of this process before its first computation, and measure their bits.

    Args:
        is_portable: Whether to compute portable bits. None: as the environment says.
        device: The device that this rank computes on.
        set_variable: The function that sets a variable of the environment.

    Raises:
        UsageError: This process cannot compute portable bits, or torch has chosen other kernels.
    """
    if is_portable is None:
        is_portable = is_portable_requested(os.environ)
    if not is_portable:
        measure_arithmetic()
        return
    if device.type != "cpu":
        raise UsageError(
            f"portable bits are those of the CPU, and this rank computes on {device}: pass "
            'device="cpu" to ls.init, or run without --portable'
        )
    variables = find_missing_variables(os.environ, {PORTABLE: "1", **OF_TORCH})
    _replace_kernels(True)
    for name, value in variables.items():
        set_variable(name, value)
    _verify(is_set_here=bool(variables))


def restore_kernels() -> None:
    """Restore the kernels of torch that portable arithmetic has replaced."""
    if has_portable_bits():
        _replace_kernels(False)


def _replace_kernels(enabled: bool) -> None:
    use_portable_products(enabled)
    declare_portable(enabled)


def _verify(is_set_here: bool) -> None:
    """Raise UsageError unless this process computes portable bits.

    Args:
        is_set_here: Whether this process has set a variable that a library may have read before.
    """
    version = ".".join(torch.__version__.split(".")[:2])
    expected = CONSTANTS.get(version)
    if expected is None:
        _note_unknown(version)
        return
    families = name_differences(measure_of_torch(), expected)
    if not families:
        return
    difference = f"this process computes {families} with other bits than portable arithmetic"
    if is_set_here:
        raise UsageError(
            f"{difference}, because torch had computed something before ls.init(portable=True), "
            "and keeps the kernels that it chose then: call ls.init first, or start the script "
            "with `lockstep run --portable`"
        )
    raise UsageError(
        f"{difference} with torch {version}: this build of torch ({torch.__version__}) has other "
        "kernels, or the program has changed how they compute; run without --portable"
    )


def measure_of_torch() -> str:
    """Return the fingerprint of this process without what does not depend on torch alone."""
    hashes = parse(measure_arithmetic())
    return join({name: hashes[name] for name in hashes if name not in NOT_OF_TORCH})


@functools.cache
def _note_unknown(version: str) -> None:
    log(
        f"the bits of portable arithmetic with torch {version} are not known to this version of "
        "Lockstep, so they are not verified"
    )


if __name__ == "__main__":
    os.environ.update(find_missing_variables(os.environ, OF_TORCH))
    _replace_kernels(True)
    print(measure_of_torch())
