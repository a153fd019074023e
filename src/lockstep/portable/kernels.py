"""Portable arithmetic: the same bits on every x86-64 processor with AVX2.

Each library reads its variable (`variables.py`) at its first computation. Torch's own
kernels and oneDNN then use AVX2, and MKL uses code that does not depend on the vendor of the
processor. The native module replaces matrix products, to make them fast, and the functions whose
bits depend on the processor nevertheless. The fingerprint of arithmetic shows whether a library had
chosen other kernels before: it must be the constant of this version of torch.

    asked for     portable bits, or an error
    by default    portable bits where they can be computed; otherwise torch's own kernels, and a
                  sentence says why

    python -m lockstep.portable.kernels      prints the constant that this machine computes
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from lockstep.comm.native_module import reason_unavailable
from lockstep.kernel.errors import UsageError
from lockstep.messages import log
from lockstep.portable.arithmetic import (
    declare_portable,
    has_portable_bits,
    measure_arithmetic,
)
from lockstep.portable.arithmetic_difference import NOT_OF_TORCH, join, name_differences, parse
from lockstep.portable.products import use_portable_products
from lockstep.portable.variables import (
    OF_TORCH,
    PORTABLE,
    find_missing_variables,
    find_problem,
    read_portable_request,
)

__all__ = [
    "CONSTANTS",
    "choose_kernels",
    "measure_of_torch",
    "restore_kernels",
]

CONSTANTS = {
    "2.13": "matrix products=a02e39c9, convolutions=eab86da6, attention=f3b96edf, "
    "LSTM layers=b805c724, softmax=a669741a, elementwise functions=3a95176e, "
    "normalization=f77ce43d, reductions=7690fa89, random numbers=80839d00",
}
"""The fingerprint of portable arithmetic by the minor version of torch, without the families that
do not depend on torch alone."""

VERSION = ".".join(torch.__version__.split(".")[:2])
"""The minor version of torch."""

COMPUTED_BEFORE = (
    "because torch had computed something before lockstep.init() and keeps the kernels that it "
    "chose then"
)


def choose_kernels(
    is_portable: bool | None,
    device: torch.device,
    set_variable: Callable[[str, str], None],
    say: Callable[[str], None] = log,
) -> bool:
    """Choose the kernels of this process before its first computation, and measure their bits.

    Args:
        is_portable: Whether to compute portable bits. None: as the environment says, and if it
            does not, where this process can.
        device: The device that this rank computes on.
        set_variable: The function that sets a variable of the environment.
        say: The function that prints what the user should know.

    Returns:
        Whether this process computes portable bits.

    Raises:
        UsageError: Portable bits are asked for, but this process cannot compute them, or torch
            has chosen other kernels.
    """
    if is_portable is None:
        is_portable = read_portable_request(os.environ)
    if is_portable is None:
        is_possible = device.type == "cpu" and not find_problem()
        if is_possible and _try_kernels(set_variable, say):
            return True
    if not is_portable:
        restore_kernels()  # also those of a process that this one was forked from
        measure_arithmetic()
        return False
    if device.type != "cpu":
        raise UsageError(
            f"portable bits are those of the CPU, and this rank computes on {device}: pass "
            'device="cpu" to ls.init, or run without --portable'
        )
    variables = find_missing_variables(os.environ, {PORTABLE: "1", **OF_TORCH})
    _replace_kernels(True)
    for name, value in variables.items():
        set_variable(name, value)
    if families := _find_other_families(say):
        _refuse(families, is_set_here=bool(variables))
    return True


def restore_kernels() -> None:
    """Restore the kernels of torch that portable arithmetic has replaced."""
    if has_portable_bits():
        _replace_kernels(False)


def _replace_kernels(enabled: bool) -> None:
    use_portable_products(enabled)
    declare_portable(enabled)


def _try_kernels(set_variable: Callable[[str, str], None], say: Callable[[str], None]) -> bool:
    """Choose portable kernels if this process can compute with them; otherwise say why not."""
    if missing := reason_unavailable():
        reason = f"because the compiled backend is not available: {missing}"
    else:
        reason = _choose(set_variable, say)
    if not reason:
        return True
    say(
        f"bits depend on the kind of processor and on the number of threads, {reason}; or choose "
        "this with lockstep.init(portable=False)"
    )
    return False


def _choose(set_variable: Callable[[str, str], None], say: Callable[[str], None]) -> str:
    """Choose portable kernels; return why this process cannot compute with them, "" if it can."""
    try:
        variables = find_missing_variables(os.environ, OF_TORCH)
    except UsageError as error:
        return f"because {error.reason}"
    # Asked first, and before the other libraries: torch has chosen its kernels if it has computed
    # anything, and then MKL, which is slow with its variable, must not read it.
    first = "ATEN_CPU_CAPABILITY"
    if first in variables:
        set_variable(first, variables[first])
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return f"{COMPUTED_BEFORE}: call it at the beginning of the script"
    _replace_kernels(True)
    for name in variables.keys() - {first}:
        set_variable(name, variables[name])
    families = _find_other_families(say)
    return f"{COMPUTED_BEFORE} ({families}): call it at the beginning" if families else ""


def _find_other_families(say: Callable[[str], None]) -> str:
    """Return the families that this process computes with other bits than portable arithmetic."""
    expected = CONSTANTS.get(VERSION)
    if expected is None:
        say(
            f"the bits of portable arithmetic with torch {VERSION} are not known to this version "
            "of Lockstep, so they are not verified"
        )
        return ""
    return name_differences(measure_of_torch(), expected)


def _refuse(families: str, is_set_here: bool) -> None:
    """Raise UsageError because this process computes some families with other bits.

    Args:
        families: Their names.
        is_set_here: Whether this process has set a variable that a library may have read before.
    """
    difference = f"this process computes {families} with other bits than portable arithmetic"
    if is_set_here:
        raise UsageError(
            f"{difference}, because torch had computed something before ls.init(portable=True), "
            "and keeps the kernels that it chose then: call ls.init first, or start the script "
            "with `lockstep run --portable`"
        )
    raise UsageError(
        f"{difference} with torch {VERSION}: this build of torch ({torch.__version__}) has other "
        "kernels, or the program has changed how they compute; run without --portable"
    )


def measure_of_torch() -> str:
    """Return the fingerprint of this process without what does not depend on torch alone."""
    hashes = parse(measure_arithmetic())
    return join({name: hashes[name] for name in hashes if name not in NOT_OF_TORCH})


if __name__ == "__main__":
    os.environ.update(find_missing_variables(os.environ, OF_TORCH))
    _replace_kernels(True)
    print(measure_of_torch())
