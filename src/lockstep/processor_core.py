"""The processor of this machine, and the cores of a computation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = [
    "CGROUP",
    "count_usable_cores",
    "divide_cores",
    "find_core",
    "on_another_core",
    "on_core",
    "one_thread",
    "processor_name",
    "read_core_quota",
]

CGROUP = Path("/sys/fs/cgroup")
"""The folder with the limits of this process's container."""


def processor_name() -> str:
    """Return the model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def count_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_core_quota(folder: Path = CGROUP) -> float | None:
    """Return the container's limit of CPU time, in cores; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        share, period = (folder / "cpu.max").read_text().split()
        return int(share) / int(period)
    return None


def divide_cores(processes: int) -> int:
    """Return the number of threads for each of some processes that share the usable cores."""
    usable = min(count_usable_cores(), read_core_quota() or count_usable_cores())
    return max(1, int(usable / processes))


def find_core() -> int:
    """Return the processor core on which this thread runs; -1 if the system does not say."""
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (OSError, AttributeError):
        return -1


def on_another_core() -> AbstractContextManager[None]:
    """Run the body on another core than the present one, if this thread may use one."""
    return _on_some(lambda allowed: allowed - {find_core()})


def on_core(core: int) -> AbstractContextManager[None]:
    """Run the body on a core, if this thread may use it."""
    return _on_some(lambda allowed: allowed & {core})


@contextmanager
def _on_some(choose: Callable[[set[int]], set[int]]) -> Iterator[None]:
    if not hasattr(os, "sched_getaffinity"):  # such as on macOS
        yield
        return
    allowed = os.sched_getaffinity(0)
    if chosen := choose(allowed):
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one intra-op thread in the body, as torch's loader workers do."""
    import torch  # here: `lockstep doctor` counts cores where torch cannot be imported

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
