"""The machine: cores, memory and its speed, shared memory, disk, open files, clock."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.formatting import format_bytes, format_duration, format_number
from lockstep.record.environment import processor, usable_cores
from lockstep.report.check_result import Finding, Question, bad, good, note
from lockstep.report.summary import many

__all__ = [
    "clock",
    "cores",
    "disk",
    "memory",
    "memory_speed",
    "microbatches",
    "open_files",
    "shared_memory",
]

RANK_BYTES = 400e6  # what a rank takes with torch loaded, before any model
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
SHM_ENOUGH = 1 << 30
MICROBATCHES = 8  # as the Trainer's default
COPIED = 64 << 20
FILES_A_RANK = 64
FILES_BESIDES = 128
DISK_ENOUGH = 100e6


def cores(question: Question) -> Iterator[Finding]:
    """Check that the cores that may be used suffice for ranks times threads."""
    usable, quota = usable_cores(), cpu_quota()
    what = f"{usable} of {processor()}"
    wanted = question.ranks * question.threads
    asked = f"{many(question.ranks, 'rank')} of {many(question.threads, 'thread')}"
    if quota is not None and quota < usable:
        what += f", limited to {quota:.1f} cores' time"
    if min(usable, quota or usable) < wanted:
        yield note(
            "cores",
            f"{what}; {asked} want {wanted}",
            "ranks will take turns: correct, but no faster than fewer ranks",
        )
    else:
        yield good("cores", f"{what}; enough for {asked}")


def microbatches(question: Question) -> Iterator[Finding]:
    """Say how evenly the default number of micro-batches falls on that many replicas."""
    busiest = math.ceil(MICROBATCHES / question.ranks)
    gain = MICROBATCHES / busiest
    what = f"{MICROBATCHES} (the default) on {many(question.ranks, 'replica')}"
    if question.ranks > MICROBATCHES:
        advice = f"give at least as many: --microbatches {question.ranks}"
        yield note("micro-batches", f"{what}: some would have none, which is refused", advice)
    elif MICROBATCHES % question.ranks:
        yield note(
            "micro-batches",
            f"{what}: at best {format_number(gain)} times one replica's speed",
            "a number of replicas that divides the micro-batches keeps all of them busy",
        )
    else:
        yield good("micro-batches", f"{what}: {many(busiest, 'micro-batch', 'es')} each")


def cpu_quota() -> float | None:
    """Return the cores' worth of time that the container may use; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        share, period = (CGROUP / "cpu.max").read_text().split()
        return int(share) / int(period)
    return None


def memory(question: Question) -> Iterator[Finding]:
    """Check that the free memory holds the ranks, within the container's limit."""
    import psutil

    free = float(psutil.virtual_memory().available)
    limit = memory_limit()
    what = f"{format_bytes(free)} free"
    if limit is not None and limit < free:
        what, free = f"{format_bytes(limit)} left of the container's limit", limit
    needed = question.ranks * RANK_BYTES
    wanted = f"{many(question.ranks, 'rank')} take about {format_bytes(needed)}"
    if free < needed:
        yield bad(
            "memory",
            f"{what}; {wanted} before any model",
            "start fewer ranks, or end other programs",
        )
    else:
        yield good(
            "memory", f"{what}; {many(question.ranks, 'rank')} take about {format_bytes(needed)}"
        )


def memory_limit() -> float | None:
    """Return the bytes left within the container's limit; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        return float(limit - int((CGROUP / "memory.current").read_text()))
    return None


def memory_speed(question: Question) -> Iterator[Finding]:
    """Copy 64 MiB a few times with one thread."""
    import numpy as np

    source = np.ones(COPIED, np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    speed = COPIED / statistics.median(seconds)
    what = f"one thread copies {format_bytes(speed)}/s"
    if speed < 1e9:
        yield note("memory speed", what, "very slow: is the machine busy or emulated?")
    else:
        yield good("memory speed", what)


def shared_memory(question: Question) -> Iterator[Finding]:
    """Make a shared segment, and look at the size of /dev/shm."""
    if refusal := segment_refusal():
        advice = "ranks of one host will talk through sockets, which is slower"
        yield note("shared memory", f"a segment cannot be made ({refusal})", advice)
    if sys.platform != "linux":
        return
    if not SHM.is_dir():
        yield note("shared memory", f"there is no {SHM}", "data loader workers need it: mount it")
        return
    status = os.statvfs(SHM)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    what = f"{SHM} has {format_bytes(free)} of {format_bytes(total)} free"
    if free < min(SHM_ENOUGH, total // 2) or total < SHM_ENOUGH // 2:
        advice = "data loader workers may run out of it; in Docker start with --shm-size=1g"
        yield note("shared memory", what, advice)
    else:
        yield good("shared memory", what)


def segment_refusal() -> str:
    """Make a shared segment of 1 MiB; return why it cannot be made, "" if it can."""
    if sys.platform != "linux":
        return ""
    try:
        descriptor = os.memfd_create("lockstep-doctor")
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error.strerror)
    return ""


def disk(question: Question) -> Iterator[Finding]:
    """Write a file where runs are recorded, and where temporary files go."""
    for place, use in ((Path.cwd(), "runs are recorded here"), (None, "temporary files")):
        name = "disk" if place else "temporary files"
        try:
            with tempfile.NamedTemporaryFile(dir=place, prefix=".lockstep-doctor-") as file:
                file.write(b"0" * 4096)
                file.flush()
                where = Path(file.name).parent
                status = os.statvfs(where)
        except OSError as error:
            where = place or Path(tempfile.gettempdir())
            yield bad(
                name,
                f"{where} cannot be written ({error.strerror})",
                "start from a folder of your own, or give --runs" if place else "set TMPDIR",
            )
            continue
        free = status.f_bavail * status.f_frsize
        what = f"{where} can be written, {format_bytes(free)} free ({use})"
        if free < DISK_ENOUGH:
            yield bad(name, what, "make room: a record or a checkpoint will not fit")
        else:
            yield good(name, what)


def open_files(question: Question) -> Iterator[Finding]:
    """Check the limit on open files, which the ranks inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_BESIDES + FILES_A_RANK * question.ranks
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        limit = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}"
        yield good("open files", limit)
        return
    room = "" if hard == resource.RLIM_INFINITY else f" (up to {hard:,} are allowed)"
    advice = f"raise it: ulimit -n 4096{room}"
    found = bad if soft < FILES_BESIDES else note
    yield found(
        "open files", f"up to {soft:,}; {many(question.ranks, 'rank')} may want {wanted}", advice
    )


def clock(question: Question) -> Iterator[Finding]:
    """Check that reading the clock is cheap, and that the disk agrees about the time."""
    began = time.perf_counter()
    for _ in range(10_000):
        time.perf_counter()
    cost = (time.perf_counter() - began) / 10_000
    with tempfile.NamedTemporaryFile() as file:
        apart = os.fstat(file.fileno()).st_mtime - time.time()
    if time.gmtime().tm_year < 2025:
        yield note(
            "clock", f"says {time.strftime('%Y-%m-%d')}", "set it: names of runs carry the date"
        )
    elif abs(apart) > 2:
        yield note("clock", f"the disk's clock is {apart:+.0f} s away", "set both by NTP")
    elif cost > 2e-6:
        yield note(
            "clock",
            f"reading it takes {format_duration(cost)}",
            "times of steps cost more than they should; a clock source other than tsc?",
        )
    else:
        yield good("clock", f"reading it takes {cost * 1e9:.0f} ns")
