"""Did the kernel end a process because memory ran out? What can be known of it.

The kernel's log names the process, where this user may read it; a control
group's counter says that some process of this container was ended.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = ["counted", "hint", "named"]

EVENTS = "memory.events"


def hint(pid: int, counted_before: int | None) -> str:
    """Return what to add to "was killed by SIGKILL"; empty where nothing is known."""
    if named(kernel_log(), pid):
        return "; the kernel's log says out of memory"
    now = counted()
    if now is not None and counted_before is not None and now > counted_before:
        return "; this control group ran out of memory"
    return ""


def named(log: str, pid: int) -> bool:
    """Whether the kernel's log says that it ended process `pid` for want of memory."""
    return re.search(rf"[Oo]ut of memory: Killed process {pid}\b", log) is not None


def kernel_log() -> str:
    """Return the kernel's log; empty where it may not be read."""
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while line := os.read(descriptor, 8192):
                lines.append(line)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return b"".join(lines).decode(errors="replace")


def counted() -> int | None:
    """Return how many processes of this control group were ended for want of memory."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].splitlines()[0]
        events = (Path("/sys/fs/cgroup") / own.lstrip("/") / EVENTS).read_text()
        return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    return None
