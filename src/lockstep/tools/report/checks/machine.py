"""Checks of the machine: cores, memory, shared memory, disk, open files."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.formatting import (
    format_bytes,
    format_quantity,
)
from lockstep.record.run_environment import count_usable_cores, processor_name
from lockstep.tools.report.checks import CheckResult, Requirements, bad, good, note

__all__ = ["check_cores", "check_disk", "check_memory"]
__all__ += ["check_shared_memory"]

RANK_BYTES = 400e6  # memory of a rank that has imported torch, without a model
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
MIN_SHM_BYTES = 1 << 30
MIN_DISK_BYTES = 100e6


def check_cores(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that there is a usable core for each thread of each rank."""
    usable, quota = count_usable_cores(), cpu_quota()
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


def cpu_quota() -> float | None:
    """Return the container's limit of CPU time, in cores; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        share, period = (CGROUP / "cpu.max").read_text().split()
        return int(share) / int(period)
    return None


def check_memory(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that there is enough free memory for the ranks, within the container's limit."""
    import psutil

    free = float(psutil.virtual_memory().available)
    limit = memory_limit()
    what = f"{format_bytes(free)} free"
    if limit is not None and limit < free:
        what, free = f"{format_bytes(limit)} left of the container's limit", limit
    needed = requirements.ranks * RANK_BYTES
    wanted = f"{format_quantity(requirements.ranks, 'rank')} take about {format_bytes(needed)}"
    if free < needed:
        yield bad(
            "memory",
            f"{what}; {wanted} before any model",
            "start fewer ranks, or stop other programs",
        )
    else:
        yield good(
            "memory",
            f"{what}; {wanted}",
        )


def memory_limit() -> float | None:
    """Return the bytes left within the container's limit; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        return float(limit - int((CGROUP / "memory.current").read_text()))
    return None


def check_shared_memory(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that shared memory can be allocated, and the size of /dev/shm."""
    if refusal := segment_refusal():
        advice = "ranks on one host will communicate through sockets, which is slower"
        yield note("shared memory", f"a segment cannot be created ({refusal})", advice)
    if sys.platform != "linux":
        return
    if not SHM.is_dir():
        yield note("shared memory", f"there is no {SHM}", "data loader workers need it: mount it")
        return
    status = os.statvfs(SHM)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    what = f"{SHM} has {format_bytes(free)} of {format_bytes(total)} free"
    if free < min(MIN_SHM_BYTES, total // 2) or total < MIN_SHM_BYTES // 2:
        advice = "data loader workers may run out of it; in Docker start with --shm-size=1g"
        yield note("shared memory", what, advice)
    else:
        yield good("shared memory", what)


def segment_refusal() -> str:
    """Create a shared segment of 1 MiB; return the reason if that fails, else ""."""
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


def check_disk(requirements: Requirements) -> Iterator[CheckResult]:
    """Check that files can be written to the current folder and the folder of temporary files."""
    for folder, use in ((Path.cwd(), "runs are recorded here"), (None, "temporary files")):
        name = "disk" if folder else "temporary files"
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".lockstep-doctor-") as file:
                file.write(b"0" * 4096)
                file.flush()
                where = Path(file.name).parent
                status = os.statvfs(where)
        except OSError as error:
            where = folder or Path(tempfile.gettempdir())
            yield bad(
                name,
                f"{where} cannot be written ({error.strerror})",
                "start in a writable folder, or use --runs" if folder else "set TMPDIR",
            )
            continue
        free = status.f_bavail * status.f_frsize
        what = f"{where} can be written, {format_bytes(free)} free ({use})"
        if free < MIN_DISK_BYTES:
            yield bad(name, what, "free some space: a record or a checkpoint will not fit")
        else:
            yield good(name, what)
