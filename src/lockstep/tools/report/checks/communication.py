"""Checks of the backends: which one runs use, and whether each of them works."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Iterator

from lockstep.comm import backend as native
from lockstep.comm.native.binding_folder import read_installation_reason
from lockstep.formatting import format_duration
from lockstep.kernel.errors import LockstepError
from lockstep.launcher.backend_choice import choose_backend
from lockstep.tools.report.checks import CheckResult, Requirements, bad, good, note

__all__ = [
    "available_backends",
    "check_backend",
    "check_backends",
    "check_native",
]


RANKS_TIMEOUT = 60.0  # seconds for two ranks to start, reduce and end
NUM_ELEMENTS = 1 << 20  # 4 MiB of float32
CALLS = 9


def check_native(requirements: Requirements) -> Iterator[CheckResult]:
    """Say which backend the ranks of a host use for CPU and GPU tensors, and why."""
    import torch

    from lockstep.devices import find_accelerator
    from lockstep.launcher.device_choice import find_device_backend

    reason = native.reason_unavailable()
    choose = functools.partial(
        choose_backend,
        unavailable=None if reason is None else f"here: {reason.rpartition(': ')[0]}",
        requested=os.environ.get("LOCKSTEP_BACKEND"),
        is_single_host=True,
    )
    choice = choose()
    what = f"tensors on the CPU: runs use {choice.name}, {choice.reason}"
    if reason is not None and choice.is_slower:
        why = read_installation_reason()
        built = f"; the installation built none ({why})" if why else ""
        yield note("backend", f"{what}{built}", reason.rpartition(": ")[2])
    else:
        yield good("backend", what)
    kind = find_accelerator()
    if kind is not None:
        name = find_device_backend(torch.device(kind))
        choice = choose(kind=kind, device_backend=name)
        yield good("backend", f"tensors on {kind}: runs use {choice.name}, {choice.reason}")


def available_backends() -> list[str]:
    """Return the names of the backends that two ranks on this host can use."""
    import torch
    import torch.distributed as dist

    from lockstep.devices import count_devices, find_accelerator
    from lockstep.launcher.device_choice import find_device_backend

    names = ["gloo"] if dist.is_gloo_available() else []
    kind = find_accelerator()
    if kind is not None and count_devices(kind) > 1:
        names.append(find_device_backend(torch.device(kind)))
    names += ["lockstep"] if native.available() else []
    return list(dict.fromkeys(names))


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

    try:
        answers: list[tuple[int, float]] = launch(
            _measure_all_reduce, (name,), 2, timeout=RANKS_TIMEOUT
        )
    except LockstepError as error:
        advice = "no run of two ranks will work; `lockstep run -n 2` shows more"
        return bad(name, f"2 ranks fail: {str(error).splitlines()[0]}", advice)
    if wrong := sum(wrong for wrong, _ in answers):
        advice = "do not train with this backend"
        return bad(name, f"all-reduce of 4 MiB on 2 ranks: {wrong:,} elements are wrong", advice)
    slowest = format_duration(max(seconds for _, seconds in answers))
    return good(name, f"all-reduce on 2 ranks: 4 MiB in {slowest}")


def _measure_all_reduce(name: str) -> tuple[int, float]:
    """All-reduce a tensor on each of two ranks.

    Returns:
        The number of wrong elements, and the median seconds of several calls.
    """
    import torch
    import torch.distributed as dist

    from lockstep.devices import synchronize
    from lockstep.launcher.world import init, shutdown

    is_for_cpu = "cpu" in dist.Backend.backend_capability.get(name, ["cpu"])
    device = "cpu" if is_for_cpu else None
    world = init(device=device, backend=name, timeout=RANKS_TIMEOUT / 2, portable=False)
    try:
        numbers = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=world.device)
        total = numbers
        seconds = []
        for _ in range(CALLS):
            total = numbers + world.rank
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(total)
            synchronize(total.device)
            seconds.append(time.perf_counter() - began)
        return int(torch.ne(total, 2 * numbers + 1).sum()), statistics.median(seconds)
    finally:
        shutdown()
