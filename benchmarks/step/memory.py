"""How much memory the ranks hold while they train, what they share counted once.

The kernel's *proportional set size* divides every page among the processes that
map it, so that the sum over the ranks is what the host has given them. Counted
are anonymous and shared pages, not those of program files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Watch", "proportional"]

INTERVAL = 0.05  # seconds between two looks, each of which takes 10 ms for a large process
COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def proportional(pid: int) -> int:
    """Return the proportional bytes of a process; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return 0
    return 1024 * sum(int(row[1]) for row in rows if row[0] in COUNTED)


class Watch:
    """Looks at processes again and again, from a thread, inside its `with` block.

    `rank` is the most that one of them held, `host` the most that all did together, in bytes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.rank = 0
        self.host = 0
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lockstep-bench-memory")

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Look a last time, and end."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(INTERVAL)
            held = [proportional(pid) for pid in self._pids]
            self.rank = max(self.rank, *held)
            self.host = max(self.host, sum(held))
