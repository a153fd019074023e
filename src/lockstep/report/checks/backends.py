"""Checks of the backends: all-reduce on two ranks, and ranks that compute at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.comm import backend as native
from lockstep.errors import LockstepError
from lockstep.formatting import format_duration, format_percent
from lockstep.report.checks import CheckResult, Requirements, bad, good, note

if TYPE_CHECKING:
    import torch

__all__ = ["available_backends", "check_backend", "check_backends", "check_ranks_at_once"]

TIMEOUT = 60.0  # seconds for two ranks to start, reduce and end
NUM_ELEMENTS = 1 << 20  # 4 MiB of float32
COMPUTE_SECONDS = 0.15  # alone and at the same time


def available_backends() -> list[str]:
    """Return the names of the backends that two ranks on this host can use.

    These are torch's backends and those that other packages registered.
    """
    import torch
    import torch.distributed as dist

    found = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() > 1:
        found.append("nccl")
    known = {"undefined", "fake", "gloo", "nccl", "mpi", "ucc", "xccl", "hccl"}
    if not native.available():
        known.add("lockstep")  # the name is registered even if the extension was not built
    return found + [name for name in dist.Backend.backend_list if name not in known]


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
        answers: list[AllReduceResult] = launch(_measure_all_reduce, (name,), 2, timeout=TIMEOUT)
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
    """The results of one rank: wrong elements, median seconds for 4 MiB and for 4 bytes."""

    wrong: int
    seconds: float
    latency: float


def _measure_all_reduce(name: str) -> AllReduceResult:
    """All-reduce a tensor and check the sum; runs on each of two ranks."""
    import torch

    import lockstep

    world = lockstep.init(backend=name, timeout=TIMEOUT / 2)
    try:
        device = world.device if name == "nccl" else torch.device("cpu")
        values = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) + world.rank
        expected = 2 * torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=device) + 1
        seconds, total = _time_all_reduce(values)
        latency, _ = _time_all_reduce(values[:1])
        return AllReduceResult(int(torch.ne(total, expected).sum()), seconds, latency)
    finally:
        lockstep.shutdown()


def _time_all_reduce(values: torch.Tensor) -> tuple[float, torch.Tensor]:
    """All-reduce copies of a tensor; return the median seconds and the last sum."""
    import torch
    import torch.distributed as dist

    total, seconds = values, []
    for _ in range(9):
        total = values.clone()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(total)
        if total.is_cuda:
            torch.cuda.synchronize(total.device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), total


def check_ranks_at_once(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that ranks that compute at the same time are as fast as one rank alone."""
    from lockstep.launcher.launch import launch
    from lockstep.record.environment import count_usable_cores

    ranks = min(requirements.ranks, count_usable_cores())
    if ranks < 2:
        return
    try:
        (alone,) = launch(_products_per_second, (0.0,), 1, timeout=TIMEOUT)
        rates = launch(_products_per_second, (time.time() + 1.0,), ranks, timeout=TIMEOUT)
    except LockstepError as error:
        yield bad(
            "ranks at once",
            f"{ranks} ranks fail: {str(error).splitlines()[0]}",
            "see the results above",
        )
        return
    share = min(rates) / alone
    pace = format_percent(min(share, 1.0))
    what = f"{ranks} ranks compute at the same time, each at {pace} of the speed of one rank alone"
    if share < 0.75:
        yield note(
            "ranks at once",
            what,
            "the cores are shared (hyper-threads, a quota, other programs), "
            "so more ranks will not be proportionally faster",
        )
    else:
        yield good("ranks at once", what)


def _products_per_second(start: float) -> float:
    """Multiply matrices from the wall-clock time `start` on; return products per second."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(192, 192)
    matrix @ matrix
    while time.time() < start:
        pass
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < COMPUTE_SECONDS:
        matrix @ matrix
        done += 1
    return done / passed
