"""Hang recovery: workers that wait in a collective for one that has raised are released.

    driver                          rank 1      rank 0
      │ <── error ──────────────────── raises     │ all_reduce ...
      │ raised at once to the user     │          │
      │ ── look ──────────────────────────────────> where is the main thread?
      │ <── seen {waits} ──────────────────────────
      │     all that are busy wait, twice in a row
      │ ── leave ────────────────────> leaves     │
      │                             the world     │ "rank 1 has left the group"
      │ ── end ──────────────────────> ends       │ where that was not enough

Who computes is left alone until it waits, too: the call may need nobody any more.
Gloo's connections last as long as something holds the group, a trainer for example:
then only the end of the process closes them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.remote.future import Future

__all__ = ["HangRecovery", "in_collective"]

LOOK = 0.5  # seconds from one look to the next
ENOUGH = 2  # looks in a row; a collective that goes on is over by then
INSIDE = ("torch/distributed/", "lockstep/comm/", "lockstep/pipeline/link")
DEEP = 6  # frames from the innermost one


@dataclass(eq=False)
class HangRecovery:
    """A call on all workers that failed on some, as `sentence` says.

    `left` is when those were told to leave the world, 0 before.
    """

    futures: Sequence[Future]
    sentence: str
    looks: int = 0
    last: float = 0.0
    left: float = 0.0

    def raised(self) -> list[int]:
        """Return the ranks on which the call failed."""
        return [future.rank for future in self.futures if future.failed]

    def busy(self) -> list[int]:
        """Return the ranks that have not answered."""
        return [future.rank for future in self.futures if not future.done()]

    def due(self) -> bool:
        """Whether it is time for another look; then it counts as taken."""
        now = time.monotonic()
        if now < self.last + LOOK:
            return False
        self.last, self.looks = now, self.looks + 1
        return True


def in_collective() -> bool:
    """Tell whether this process's main thread is in a call of torch.distributed or a transfer."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(DEEP):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in INSIDE):
            return True
        frame = frame.f_back
    return False
