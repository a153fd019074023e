"""The fingerprint of arithmetic: which bits this process computes.

    matrix products=26ec9e52, convolutions=0d99b336, ...

Libraries choose kernels by the processor: by its instructions, by its vendor (MKL), and by the
sizes of its caches. A fingerprint has one hash per family of operators, of small computations in
float32, float64 and bfloat16 with their gradients. Equal hashes on two processors mean that these
computations gave equal bits; an operator outside of the families may still differ.

The computations take some 30 ms, once per machine:

    key      processor, versions, variables       ──> ~/.cache/lockstep/arithmetic/KEY.json
    probe    the hash of a few operators, 1 ms, computed in every process: an entry of the cache
             counts only if this process has the same probe
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch

from lockstep.comm.native.binding_folder import get_cache_folder, reason_not_trusted
from lockstep.files import make_folder, replace_file
from lockstep.portable.arithmetic_difference import join, parse
from lockstep.portable.arithmetic_families import (
    FAMILIES,
    FLOATS,
    FUNCTIONS,
    ComputedTensors,
    make_values,
)

__all__ = [
    "compute",
    "declare_portable",
    "flushes_subnormals",
    "has_portable_bits",
    "measure_arithmetic",
]

CHOOSING = ("ATEN_", "DNNL_", "LOCKSTEP_PORTABLE", "MKL_", "NPY_", "ONEDNN_", "OPENBLAS_")
"""The prefixes of variables by which libraries choose kernels."""

OF_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")
"""The lines of /proc/cpuinfo that tell a kind of processor."""


_is_portable = False
_flushes_subnormals = False


def declare_portable(is_portable: bool) -> None:
    """Note whether the kernels of this process are those of portable arithmetic."""
    global _is_portable, _flushes_subnormals
    _is_portable = is_portable
    _flushes_subnormals = sys.float_info.min / 2 == 0
    measure_arithmetic.cache_clear()


def has_portable_bits() -> bool:
    """Return whether this process computes portable bits, on any number of intra-op threads."""
    return _is_portable


def flushes_subnormals() -> bool | None:
    """Return whether intra-op threads take subnormal numbers as 0; None without portable bits.

    Each has the setting of the thread that started it, and keeps it: `torch.set_flush_denormal`
    changes that of the thread that calls it.
    """
    return _flushes_subnormals if _is_portable else None


def compute() -> str:
    """Compute the fingerprint of this process, such as "matrix products=26ec9e52, ..."."""
    with _fixed_settings():
        return join({name: _hash_family(family) for name, family in FAMILIES.items()})


def _hash_family(family: Callable[[torch.dtype], ComputedTensors]) -> str:
    try:
        return _hash(result for dtype in FLOATS for result in family(dtype))
    except RuntimeError:
        # With ATEN_CPU_CAPABILITY=avx2 on a processor with AMX, torch 2.13 has no attention in
        # bfloat16. Whoever calls it gets torch's error.
        return "none"


@functools.cache
def measure_arithmetic() -> str:
    """Return the fingerprint of this process, computed if the cache does not have it.

    A library chooses its kernels at its first computation, and keeps them. Set the variables that
    influence the choice before.
    """
    with _fixed_settings():
        probe = _hash(_probe())
    folder = get_cache_folder().with_name("arithmetic")
    file = folder / f"{_key()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if not reason_not_trusted(folder) and not reason_not_trusted(file):
            entry = json.loads(file.read_bytes())
            if entry["probe"] == probe and [*parse(entry["arithmetic"])] == [*FAMILIES]:
                return str(entry["arithmetic"])
    arithmetic = compute()
    with contextlib.suppress(OSError):  # without a cache every process computes
        make_folder(folder)
        with replace_file(file) as stored:
            stored.write(json.dumps({"probe": probe, "arithmetic": arithmetic}).encode())
    return arithmetic


def _probe() -> ComputedTensors:
    """Yield a few results that tell most kinds of arithmetic apart.

    It calls each of MKL's vector functions, whose first call must not be made by several threads at
    once: it could return wrong results. And it calls oneDNN, which chooses its instructions then.
    """
    image = make_values(1, 8, 6, 6)
    kernel = make_values(8, 8, 3, 3)
    yield make_values(24, 130) @ make_values(130, 24)
    yield torch.conv2d(image, kernel)
    yield make_values(3, 40).softmax(1)
    if torch.backends.mkldnn.is_available():
        yield torch.mkldnn_convolution(image, kernel, None, [0, 0], [1, 1], [1, 1], 1)
    for dtype in (torch.float32, torch.float64):
        inside = make_values(64, dtype=dtype) / 4.1 + 0.5
        for name in FUNCTIONS:
            yield getattr(torch, name)(inside)


def _hash(results: ComputedTensors) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:8]


def _key() -> str:
    """Return a hash of all that chooses kernels."""
    lines = [torch.__version__, numpy.__version__, platform.machine(), *platform.libc_ver()]
    lines.append(str(sys.modules.get("lockstep.comm._native")))  # which may replace kernels
    chosen = (name for name in sorted(os.environ) if name.startswith(CHOOSING))
    lines += [f"{name}={os.environ[name]}" for name in chosen]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as processors:
        for line in processors:
            if not line.strip():  # the end of the first processor
                break
            if line.partition(":")[0].strip() in OF_PROCESSOR:
                lines.append(line)
    digest = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape"))
    digest.update(Path(__file__).with_name("arithmetic_families.py").read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _fixed_settings() -> Iterator[None]:
    """Set what a program may have set otherwise: threads, gradients, autocast, oneDNN."""
    threads = torch.get_num_threads()
    has_onednn = torch._C._get_mkldnn_enabled()
    torch.set_num_threads(1)
    torch._C._set_mkldnn_enabled(True)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(has_onednn)
        torch.set_num_threads(threads)
