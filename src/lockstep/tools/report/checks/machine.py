"""Checks of the machine: Python, torch, cores, memory, accelerators."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
from collections.abc import Iterator

from lockstep.formatting import format_bytes, format_quantity
from lockstep.processor_core import CGROUP, count_usable_cores, processor_name, read_core_quota
from lockstep.tools.report.checks import CheckResult, Requirements, bad, good, note

__all__ = ["check_accelerators", "check_cores", "check_memory", "check_python", "check_torch"]

RANK_BYTES = 400e6  # memory of a rank that has imported torch, without a model
MIN_TORCH = (2, 11)


def check_python(requirements: Requirements) -> Iterator[CheckResult]:
    """Name the version of Python and the platform."""
    what = f"{platform.python_version()} at {sys.executable}, {platform.platform()}"
    if sys.platform == "linux":
        yield good("python", what)
    else:
        yield note("python", what, "Lockstep is made for Linux; here it uses gloo")


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
        advice = "install a build with torch.distributed"
        yield bad("torch", "built without torch.distributed", advice)
    else:
        yield good("torch", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")


def check_cores(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that there is a usable core for each thread of each rank."""
    usable = count_usable_cores()
    quota = read_core_quota(CGROUP)
    what = f"{usable} of {processor_name()}"
    wanted = requirements.ranks * requirements.threads
    threads = format_quantity(requirements.threads, "thread")
    asked = f"{format_quantity(requirements.ranks, 'rank')} with {threads} each"
    if quota is not None and quota < usable:
        what += f", limited to the time of {quota:.1f} cores"
    if min(usable, quota or usable) < wanted:
        yield note(
            "cores",
            f"{what}; {asked} need {wanted}",
            "ranks will share cores: results are correct, but not faster than with fewer ranks",
        )
    else:
        yield good("cores", f"{what}; enough for {asked}")


def check_memory(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that there is enough free memory for the ranks, within the container's limit."""
    import psutil

    free = float(psutil.virtual_memory().available)
    limit = memory_limit()
    what = f"{format_bytes(free)} free"
    if limit is not None and limit < free:
        what = f"{format_bytes(limit)} left of the container's limit"
        free = limit
    needed = requirements.ranks * RANK_BYTES
    wanted = f"{format_quantity(requirements.ranks, 'rank')} take about {format_bytes(needed)}"
    if free < needed:
        yield bad(
            "memory",
            f"{what}; {wanted} before any model",
            "start fewer ranks, or stop other programs",
        )
    else:
        yield good("memory", f"{what}; {wanted}")


def memory_limit() -> float | None:
    """Return the bytes left within the container's limit; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        return float(limit - int((CGROUP / "memory.current").read_text()))
    return None


def check_accelerators(requirements: Requirements) -> Iterator[CheckResult]:
    """Name the accelerators, or say why torch cannot use an NVIDIA GPU."""
    import torch

    from lockstep.devices import device_names

    cuda = torch.version.cuda
    if names := device_names():
        yield good("gpu", ", ".join(names))
    elif not shutil.which("nvidia-smi"):
        yield good("gpu", "none; training runs on the CPU")
    elif cuda is not None:
        yield note(
            "gpu",
            f"torch {torch.__version__} supports CUDA {cuda} and finds no GPU",
            "look whether nvidia-smi lists one, and at the variable CUDA_VISIBLE_DEVICES",
        )
    else:
        yield note(
            "gpu",
            f"there is an NVIDIA driver, but torch {torch.__version__} does not support CUDA",
            "install a torch build for CUDA if you want to train on the GPU",
        )
