"""Hang recovery: releases workers that wait in a collective for one that has raised.

    driver                          rank 1      rank 0
      │ <── error ──────────────────── raises,    │ all_reduce ...
      │ raised at once to the user     │ starts   │
      │                                │ no call  │
      │ ── look ──────────────────────────────────> where is the main thread?
      │ <── seen {waits} ──────────────────────────
      │     all busy workers wait, in two checks in a row
      │ ── leave ────────────────────> leaves     │
      │                             the world,    │ "rank 1 has left the group"
      │                             continues     │
      │ ── end ──────────────────────> exits      │ if that was not enough

Nothing is done while a busy worker still computes: its call may not need the others. Until all
workers have returned from the call, those that raised start no other one: its collectives would
be paired with those of the failed call, and add values of two calls.
Gloo's connections exist as long as anything holds the group, such as a trainer; then only
the end of the process closes them.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.remote.future import SETTLE, Future, make_error
from lockstep.tools.remote.roster import WorkerHandle

__all__ = ["COMMUNICATION", "HangRecovery", "SharedCall", "is_in_collective"]

CHECK_INTERVAL = 0.5  # seconds
CHECKS = 2  # checks in a row that must find a worker waiting: longer than a running collective
COMMUNICATION = ("torch/distributed/", "lockstep/comm/", "lockstep/pipeline/p2p")
MAX_FRAMES = 6  # counted from the innermost one


@dataclass(eq=False)
class SharedCall:
    """A call on all workers that has not returned on some of them.

    Attributes:
        number: The number of the call.
        futures: Its futures.
        checks: The number of checks of the busy workers so far.
        last_check: The `time.monotonic()` time of the last check.
        left_at: The `time.monotonic()` time at which the failed workers were asked to leave the
            world; 0 if they were not, infinite once they were asked to exit.
    """

    number: int
    futures: Sequence[Future[Any]]
    checks: int = 0
    last_check: float = 0.0
    left_at: float = 0.0

    def failed(self) -> list[int]:
        """Return the ranks on which the call failed."""
        return [future.rank for future in self.futures if future.has_failed]

    def busy(self) -> list[int]:
        """Return the ranks on which the call has not returned."""
        return [future.rank for future in self.futures if not future.done()]

    def start_check(self) -> bool:
        """Return whether another check is due; if so, count it."""
        now = time.monotonic()
        if now < self.last_check + CHECK_INTERVAL:
            return False
        self.last_check, self.checks = now, self.checks + 1
        return True


class HangRecovery:
    """The calls of one driver on all workers.

    Attributes:
        calls: The calls whose workers may have to be released.
        world_error: Why the workers' world has ended; empty while it exists.
    """

    def __init__(self) -> None:
        self.calls: list[SharedCall] = []
        self.world_error = ""

    @property
    def is_decided(self) -> bool:
        """Whether it is known if the world has ended."""
        is_open = any(call.failed() and call.busy() for call in list(self.calls))
        return not is_open or bool(self.world_error)

    def watch(self, number: int, futures: Sequence[Future[Any]]) -> None:
        """Release workers if this call, on all of them, raises on some only."""
        self.calls.append(SharedCall(number, futures))

    def explain(self, error: Exception) -> None:
        """Add to the message of a later error that the world has ended, and why."""
        if self.world_error and str(error) not in self.world_error:
            error.args = (f"{error}; {self.world_error}",)

    def proceed(self, workers: Sequence[WorkerHandle]) -> None:
        """Take the next step for each call; `workers` are in rank order."""
        for call in list(self.calls):
            busy = [workers[rank] for rank in call.busy()]
            failed = [workers[rank] for rank in call.failed()]
            if not busy:
                self.calls.remove(call)
                for worker in failed:
                    worker.connection.post({"kind": "continue", "number": call.number})
            # After the death of a worker, the backend reports it to the others.
            elif failed and not any(worker.lost for worker in failed):
                self._release(call, busy, failed)

    def _release(
        self, call: SharedCall, busy: Sequence[WorkerHandle], failed: Sequence[WorkerHandle]
    ) -> None:
        """Check or release busy workers."""
        if call.left_at:
            if time.monotonic() > call.left_at + SETTLE:  # leaving the world has not helped
                call.left_at = math.inf
                for worker in failed:
                    worker.connection.post({"kind": "end"})
        elif self.world_error:  # the workers that have left it for another call release these
            return
        elif call.checks > CHECKS and all(worker.waits >= CHECKS for worker in busy):
            reason = make_error(call.futures)
            self.world_error = (
                f"the world of these workers has ended, because the others waited in a collective "
                f"after this error: {reason}; start new workers with driver.restart() and "
                "make the trainers again"
            )
            call.left_at = time.monotonic()
            for worker in failed:
                worker.connection.post({"kind": "leave", "number": call.number})
        elif call.start_check():
            for worker in busy:
                worker.waits = worker.waits if call.checks > 1 else 0
                worker.connection.post({"kind": "look"})


def is_in_collective() -> bool:
    """Return whether this process's main thread is in a call that communicates."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in COMMUNICATION):
            return True
        frame = frame.f_back
    return False
