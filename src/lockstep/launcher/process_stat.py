"""The kernel's report on a process, such as its state."""

from __future__ import annotations

__all__ = ["read_stat"]


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (R, S, D, T, Z) on; [] if there is none.

    State T is a process that a signal has stopped.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
