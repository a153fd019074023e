"""Portable arithmetic: the same bits on every x86-64 processor with AVX2.

Each library reads its variable (`kernel_variables.py`) at its first computation. Torch's own
kernels and oneDNN then use AVX2, and MKL uses code that does not depend on the vendor of the
processor. The fingerprint of arithmetic shows whether a library had chosen other kernels before:
it must be the constant of this version of torch.

    python -m lockstep.launcher.portable      prints the constant that this machine computes
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from lockstep.kernel.errors import UsageError
from lockstep.launcher import arithmetic
from lockstep.launcher.arithmetic_difference import NOT_OF_TORCH, join, name_differences, parse
from lockstep.launcher.kernel_variables import (
    OF_TORCH,
    PORTABLE,
    find_missing,
    is_portable_requested,
)
from lockstep.messages import log

__all__ = ["CONSTANTS", "choose_kernels", "measure_of_torch"]

CONSTANTS = {
    "2.13": "matrix products=f7bba08e, convolutions=eccb0f86, attention=a5754839, "
    "softmax=a669741a, elementwise functions=3a391d1d, normalization=f77ce43d, "
    "reductions=7690fa89, random numbers=80839d00",
}
"""The fingerprint of portable arithmetic by the minor version of torch, without the families that
do not depend on torch alone."""


def choose_kernels(is_portable: bool | None, set_variable: Callable[[str, str], None]) -> None:
    """Choose the kernels of this process before its first computation, and measure their bits.

    Args:
        is_portable: Whether to compute portable bits. None: as the environment says.
        set_variable: The function that sets a variable of the environment.

    Raises:
        UsageError: This process cannot compute portable bits, or torch has chosen other kernels.
    """
    if is_portable is None:
        is_portable = is_portable_requested(os.environ)
    variables = find_missing(os.environ, {PORTABLE: "1", **OF_TORCH}) if is_portable else {}
    for name, value in variables.items():
        set_variable(name, value)
    if is_portable:
        _verify(is_set_here=bool(variables))
    else:
        arithmetic.measure()


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
    hashes = parse(arithmetic.measure())
    return join({name: hashes[name] for name in hashes if name not in NOT_OF_TORCH})


@functools.cache
def _note_unknown(version: str) -> None:
    log(
        f"the bits of portable arithmetic with torch {version} are not known to this version of "
        "Lockstep, so they are not verified"
    )


if __name__ == "__main__":
    os.environ.update(find_missing(os.environ, OF_TORCH))
    print(measure_of_torch())
