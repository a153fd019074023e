"""What the kernel says about a process: its state, and when it started."""

from __future__ import annotations

__all__ = ["find_start", "read_stat"]

START = 19  # the index of its field in `read_stat`, in clock ticks since the machine has started


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (R, S, D, T, Z) on; [] if there is none.

    State T is a process that a signal has stopped.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def find_start(pid: int) -> int | None:
    """Return when a process started; None if it has ended.

    Process ids are used again: only with its start, an id names one process for good.
    """
    fields = read_stat(pid)
    has_ended = not fields or fields[0] in ("Z", "X")
    return None if has_ended else int(fields[START])
