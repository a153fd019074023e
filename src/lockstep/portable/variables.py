"""The environment variables by which libraries choose kernels, and their values for portable bits.

lockstep run --portable     OF_TORCH and those of numpy are set in every process
ls.init()                   OF_TORCH are set; numpy has been loaded before
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from lockstep.kernel.errors import UsageError

__all__ = [
    "OF_TORCH",
    "PORTABLE",
    "find_bfloat16_instructions",
    "find_missing_variables",
    "find_of_launch",
    "find_of_numpy",
    "find_problem",
    "read_portable_request",
]

PORTABLE = "LOCKSTEP_PORTABLE"
"""The variable that asks for portable bits (1), or for torch's own kernels (0)."""

OF_TORCH = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Variables that each library reads at its first computation."""


def read_portable_request(environ: Mapping[str, str]) -> bool | None:
    """Return whether the environment asks for portable arithmetic; None if it does not say."""
    value = environ.get(PORTABLE, "")
    return None if value == "" else value != "0"


@functools.cache
def find_of_numpy() -> dict[str, str]:
    """Return the variables that numpy reads when it is loaded.

    It warns of features that it does not know: levels of x86-64 have replaced sets of instructions.
    """
    major, minor, *_ = metadata.version("numpy").split(".")
    features = "X86_V4 AVX512_ICL AVX512_SPR"
    if (int(major), int(minor)) < (2, 4):
        features = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR"
    return {"OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": features}


def find_of_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a launch with portable arithmetic.

    Raises:
        UsageError: As for `find_missing_variables`.
    """
    return find_missing_variables(environ, {PORTABLE: "1", **OF_TORCH, **find_of_numpy()})


def find_missing_variables(
    environ: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, str]:
    """Return those of `variables` that are not set yet.

    Raises:
        UsageError: One has another value, or this processor cannot compute portable bits.
    """
    if problem := find_problem():
        raise UsageError(f"portable arithmetic needs an x86-64 processor with AVX2: {problem}")
    for name, value in variables.items():
        if environ.get(name, value).lower() != value.lower():
            raise UsageError(
                f"{name}={environ[name]} contradicts portable arithmetic",
                f", which needs {value}: unset it, or run without --portable",
            )
    return {name: value for name, value in variables.items() if name not in environ}


def find_problem() -> str:
    """Return why this processor cannot compute portable bits; "" if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"this is {platform.machine()}"
    flags = _read_flags()
    if flags is None:
        return ""
    missing = [name for name in ("avx2", "fma") if name not in flags]
    return f"it has no {' and no '.join(missing)}" if missing else ""


def find_bfloat16_instructions() -> str:
    """Return which instructions of this processor multiply in bfloat16; "" if it has none."""
    flags = _read_flags() or frozenset()
    return " and ".join(name for name in ("amx_bf16", "avx512_bf16") if name in flags)


@functools.cache
def _read_flags() -> frozenset[str] | None:
    """Return the names of the instructions that the processor has; None if Linux does not say."""
    try:
        processor = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:  # another system
        return None
    return frozenset(processor.split())
