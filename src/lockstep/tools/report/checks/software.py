"""Checks of the software: Python, torch, compiler, GPUs."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.comm.native.build import CompilationError, find_requirements
from lockstep.formatting import format_bytes
from lockstep.tools.report.checks import CheckResult, Requirements, bad, good, note

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_compiler",
    "check_gpus",
    "check_python",
    "check_torch",
]

MIN_TORCH = (2, 11)


def check_python(requirements: Requirements) -> Iterator[CheckResult]:
    """Name the version of Python, and check the platform."""
    yield good("python", f"{platform.python_version()} at {sys.executable}")
    if sys.platform == "linux":
        yield good("platform", platform.platform())
    else:
        yield note(
            "platform",
            platform.platform(),
            "Lockstep is made for Linux; here it uses gloo, without the native extension",
        )


def check_torch(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that torch can be imported, is new enough and has torch.distributed."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield bad("torch", f"cannot be imported: {error}", "install torch 2.11 or later")
        return
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    if version < MIN_TORCH:
        yield bad("torch", torch.__version__, "Lockstep needs torch 2.11 or later: upgrade it")
    elif not torch.distributed.is_available():
        yield bad(
            "torch", "built without torch.distributed", "install a build with torch.distributed"
        )
    else:
        yield good("torch", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")


def check_compiler(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that there is what `lockstep build` needs."""
    try:
        compiler = find_requirements()
    except CompilationError as error:
        yield note(
            "compiler",
            str(error),
            "only `lockstep build` needs it: install g++ or clang++, python3-dev and ninja, or set "
            "CXX",
        )
    else:
        yield good("compiler", f"{compiler[0]}, ninja and Python's headers are installed")


def check_gpus(requirements: Requirements) -> Iterator[CheckResult]:
    """Multiply matrices on each accelerator and compare with the CPU."""
    import torch

    from lockstep.devices import device_names, find_accelerator

    kind = find_accelerator()
    if kind is None:
        if torch.version.cuda is not None and shutil.which("nvidia-smi"):
            yield note(
                "gpu",
                f"torch {torch.__version__} supports CUDA {torch.version.cuda} and finds no GPU",
                "look whether nvidia-smi lists one, and at the variable CUDA_VISIBLE_DEVICES",
            )
        elif shutil.which("nvidia-smi"):
            yield note(
                "gpu",
                f"there is an NVIDIA driver, but torch {torch.__version__} does not support CUDA",
                "install a torch build for CUDA if you want to train on the GPU",
            )
        else:
            yield good("gpu", "none; training runs on the CPU")
        return
    for index, name in enumerate(device_names()):
        yield check_gpu(torch.device(kind, index), name)
    if kind != "cuda":
        return
    if torch.distributed.is_nccl_available():
        yield good("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield bad("nccl", "this torch has no NCCL", "install a torch build with NCCL")


def check_gpu(device: torch.device, description: str) -> CheckResult:
    """Multiply matrices on one accelerator and compare with the CPU."""
    import torch

    name = f"gpu {device.index}"
    try:
        matrix = torch.arange(4096.0).reshape(64, 64) % 7
        product = (matrix.to(device) @ matrix.to(device)).cpu()
        measure = getattr(torch.get_device_module(device), "mem_get_info", None)
        memory = None if measure is None else measure(device)
    except RuntimeError as error:
        advice = "check the driver, with nvidia-smi for a GPU of NVIDIA"
        return bad(name, f"fails: {str(error).splitlines()[0]}", advice)
    what = description
    if memory is not None:
        free, total = memory
        what += f", {format_bytes(free)} of {format_bytes(total)} free"
    if not torch.equal(product, matrix @ matrix):
        return bad(name, f"{what}: matrix products are wrong", "do not use this device")
    return good(name, what)
