"""Checks of the backends: which one runs use, and whether each of them works."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.comm import backend as native
from lockstep.comm.native.binding import BindingError
from lockstep.comm.native.binding_folder import read_installation_reason
from lockstep.formatting import format_duration
from lockstep.kernel.errors import LockstepError
from lockstep.launcher.backend_choice import choose_backend
from lockstep.tools.report.checks import CheckResult, Requirements, bad, good, note

if TYPE_CHECKING:
    import torch

__all__ = [
    "available_backends",
    "check_backend",
    "check_backends",
    "check_native",
]


RANKS_TIMEOUT = 60.0  # seconds for two ranks to start, reduce and end
NUM_ELEMENTS = 1 << 20  # 4 MiB of float32


def check_native(requirements: Requirements) -> Iterator[CheckResult]:
    """Say which backend runs use here for CPU and GPU tensors, and why."""
    import torch

    from lockstep.devices import find_accelerator
    from lockstep.launcher.device_choice import find_device_backend

    reason = native.reason_unavailable()
    requested = os.environ.get("LOCKSTEP_BACKEND")
    choose = functools.partial(
        choose_backend,
        unavailable=None if reason is None else f"here: {reason.rpartition(': ')[0]}",
        requested=requested,
    )
    one, several = (choose(is_single_host=is_single) for is_single in (True, False))
    if one.is_slower:
        assert reason is not None
        why = read_installation_reason()
        built = f"; the installation built none ({why})" if why and not _has_binding() else ""
        what = f"tensors on the CPU: runs use {one.name}, {one.reason}{built}"
        yield note("backend", what, reason.rpartition(": ")[2])
    elif one == several:
        yield good("backend", f"tensors on the CPU: runs use {one.name}, {one.reason}")
    else:
        yield good(
            "backend",
            f"tensors on the CPU: runs on one host use {one.name}, {one.reason}; runs on several "
            f"hosts that have it use {several.name}",
        )
    kind = find_accelerator()
    if kind is not None:
        name = find_device_backend(torch.device(kind))
        choice = choose(kind=kind, device_backend=name, is_single_host=True)
        yield good("backend", f"tensors on {kind}: runs use {choice.name}, {choice.reason}")


def _has_binding() -> bool:
    try:
        native.load_native()
    except BindingError:
        return False
    return True


def available_backends() -> list[str]:
    """Return the names of the backends that two ranks on this host can use.

    These are torch's backends and those that other packages registered.
    """
    import torch
    import torch.distributed as dist

    from lockstep.devices import count_devices, find_accelerator
    from lockstep.launcher.device_choice import find_device_backend

    names = ["gloo"] if dist.is_gloo_available() else []
    kind = find_accelerator()
    if kind is not None and count_devices(kind) > 1:
        name = find_device_backend(torch.device(kind))
        names += [name] if name not in names else []
    # torch's "mpi" is left out too, because only mpiexec can start its ranks.
    known = {"undefined", "fake", "gloo", "nccl", "mpi", "ucc", "xccl", "hccl", *names}
    if not native.available():
        known.add("lockstep")  # the name is registered even if the extension was not built
    return names + [name for name in dist.Backend.backend_list if name not in known]


def check_backends(requirements: Requirements) -> Iterator[CheckResult]:
    """Check each available backend."""
    names = available_backends()
    if not names:
        yield bad(
            "backend",
            "torch has none that works on this machine",
            "install a torch build with gloo",
        )
    for name in names:
        yield check_backend(name)


def check_backend(name: str) -> CheckResult:
    """Start two ranks, all-reduce 4 MiB, and check and time the result."""
    from lockstep.launcher.launch import launch

    began = time.perf_counter()
    try:
        answers: list[AllReduceResult] = launch(
            _measure_all_reduce, (name,), 2, timeout=RANKS_TIMEOUT
        )
    except LockstepError as error:
        advice = "no run of two ranks will work; `lockstep run -n 2` shows more"
        return bad(name, f"2 ranks fail: {str(error).splitlines()[0]}", advice)
    whole = format_duration(time.perf_counter() - began)
    wrong = sum(answer.wrong for answer in answers)
    if wrong:
        advice = "do not train with this backend"
        return bad(name, f"all-reduce of 4 MiB on 2 ranks: {wrong:,} elements are wrong", advice)
    slowest = max(answer.seconds for answer in answers)
    latency = max(answer.latency for answer in answers)
    return good(
        name,
        f"all-reduce on 2 ranks: 4 MiB in {format_duration(slowest)}, "
        f"4 B in {format_duration(latency)} ({whole} with start and end)",
    )


@dataclass(frozen=True)
class AllReduceResult:
    """The results of one rank: number of wrong elements, median seconds for 4 MiB and 4 bytes."""

    wrong: int
    seconds: float
    latency: float


def _measure_all_reduce(name: str) -> AllReduceResult:
    """All-reduce a tensor and check the sum; runs on each of two ranks."""
    import torch
    import torch.distributed as dist

    from lockstep.launcher.world import init, shutdown

    is_for_cpu = "cpu" in dist.Backend.backend_capability.get(name, ["cpu"])
    world = init(device="cpu" if is_for_cpu else None, backend=name, timeout=RANKS_TIMEOUT / 2)
    try:
        device = world.device
        values = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) + world.rank
        expected = 2 * torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) + 1
        seconds, total = _time_all_reduce(values)
        latency, _ = _time_all_reduce(values[:1])
        return AllReduceResult(int(torch.ne(total, expected).sum()), seconds, latency)
    finally:
        shutdown()


def _time_all_reduce(values: torch.Tensor) -> tuple[float, torch.Tensor]:
    """All-reduce copies of a tensor; return the median seconds and the last sum."""
    import torch.distributed as dist

    from lockstep.devices import synchronize

    total, seconds = values, []
    for _ in range(9):
        total = values.clone()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(total)
        synchronize(total.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), total
