"""Backends: two ranks for each that is present, which reduce a tensor and time it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.comm import backend as native
from lockstep.errors import LockstepError
from lockstep.formatting import format_duration, format_percent
from lockstep.report.check_result import Finding, Question, bad, good, note

if TYPE_CHECKING:
    import torch

__all__ = ["backends", "present", "together"]

PATIENCE = 60.0  # seconds for two ranks to start, reduce and leave
ELEMENTS = 1 << 20  # 4 MiB of float32
BUSY = 0.15  # seconds of arithmetic, alone and together


def present() -> list[str]:
    """Return the names of the backends that two ranks of this host can use now.

    Those that torch has, and those that anything else has registered with it.
    """
    import torch
    import torch.distributed as dist

    found = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() > 1:
        found.append("nccl")
    known = {"undefined", "fake", "gloo", "nccl", "mpi", "ucc", "xccl", "hccl"}
    if not native.available():
        known.add("lockstep")  # it has its name also where it was not built
    return found + [name for name in dist.Backend.backend_list if name not in known]


def backends(question: Question) -> Iterator[Finding]:
    """Reduce a tensor on two ranks with each backend that is present."""
    names = present()
    if not names:
        yield bad("backend", "torch has none that works here", "install a torch build with gloo")
    for name in names:
        yield backend(name)


def backend(name: str) -> Finding:
    """Start two ranks, let them add 4 MiB, check every element, and say how long it took."""
    from lockstep.launcher.launch import launch

    began = time.perf_counter()
    try:
        answers: list[Reduced] = launch(reduce_once, (name,), 2, timeout=PATIENCE)
    except LockstepError as error:
        advice = "no run of two ranks will work; `lockstep run -n 2` shows more"
        return bad(name, f"2 ranks fail: {str(error).splitlines()[0]}", advice)
    whole = format_duration(time.perf_counter() - began)
    wrong = sum(answer.wrong for answer in answers)
    if wrong:
        advice = "do not train with this backend"
        return bad(name, f"2 ranks add 4 MiB, and {wrong:,} elements are wrong", advice)
    slowest = max(answer.seconds for answer in answers)
    latency = max(answer.latency for answer in answers)
    return good(
        name,
        f"2 ranks add 4 MiB in {format_duration(slowest)}, 4 B in {format_duration(latency)} "
        f"(started, done and gone in {whole})",
    )


@dataclass(frozen=True)
class Reduced:
    """What a rank saw: wrong elements, median seconds of 4 MiB and of 4 bytes."""

    wrong: int
    seconds: float
    latency: float


def reduce_once(name: str) -> Reduced:
    """Run on each of two ranks: all-reduce a tensor a few times and check the sum."""
    import torch

    import lockstep

    world = lockstep.init(backend=name, timeout=PATIENCE / 2)
    try:
        device = world.device if name == "nccl" else torch.device("cpu")
        values = torch.arange(ELEMENTS, dtype=torch.float32, device=device) + world.rank
        expected = 2 * torch.arange(ELEMENTS, dtype=torch.float32, device=device) + 1
        seconds, total = timed(values)
        latency, _ = timed(values[:1])
        return Reduced(int(torch.ne(total, expected).sum()), seconds, latency)
    finally:
        lockstep.shutdown()


def timed(values: torch.Tensor) -> tuple[float, torch.Tensor]:
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


def together(question: Question) -> Iterator[Finding]:
    """Let the ranks compute alone and at the same time: are the cores really there?"""
    from lockstep.launcher.launch import launch
    from lockstep.record.environment import usable_cores

    ranks = min(question.ranks, usable_cores())
    if ranks < 2:
        return
    try:
        (alone,) = launch(work_rate, (0.0,), 1, timeout=PATIENCE)
        rates = launch(work_rate, (time.time() + 1.0,), ranks, timeout=PATIENCE)
    except LockstepError as error:
        yield bad("ranks at once", f"{ranks} ranks fail: {str(error).splitlines()[0]}", "see above")
        return
    share = min(rates) / alone
    pace = format_percent(min(share, 1.0))
    what = f"{ranks} ranks compute at the same time, each at {pace} of its speed alone"
    if share < 0.75:
        yield note(
            "ranks at once",
            what,
            "the cores are shared (hyper-threads, a quota, other programs): "
            "more ranks will not be that much faster",
        )
    else:
        yield good("ranks at once", what)


def work_rate(start: float) -> float:
    """Multiply matrices for a moment from `start` (wall clock) on; return products a second."""
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(192, 192)
    matrix @ matrix
    while time.time() < start:
        pass
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < BUSY:
        matrix @ matrix
        done += 1
    return done / passed
