"""Hang recovery: releases workers that wait in a collective for one that has raised.

    driver                          rank 1      rank 0
      │ <── error ──────────────────── raises     │ all_reduce ...
      │ raised at once to the user     │          │
      │ ── look ──────────────────────────────────> where is the main thread?
      │ <── seen {waits} ──────────────────────────
      │     all busy workers wait, in two checks in a row
      │ ── leave ────────────────────> leaves     │
      │                             the world     │ "rank 1 has left the group"
      │ ── end ──────────────────────> exits      │ if that was not enough

Nothing is done while a busy worker still computes: its call may not need the others.
Gloo's connections exist as long as anything holds the group, such as a trainer; then only
the end of the process closes them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.remote.future import SETTLE, Future
from lockstep.tools.remote.roster import WorkerHandle

__all__ = ["COMMUNICATION", "FailedCall", "HangRecovery", "is_in_collective"]

CHECK_INTERVAL = 0.5  # seconds
CHECKS = 2  # checks in a row that must find a worker waiting: longer than a running collective
COMMUNICATION = ("torch/distributed/", "lockstep/comm/", "lockstep/pipeline/p2p")
MAX_FRAMES = 6  # counted from the innermost one


@dataclass(eq=False)
class FailedCall:
    """A call on all workers that failed on some of them.

    Attributes:
        futures: The calls.
        reason: The error.
        checks: The number of checks of the busy workers so far.
        last_check: The `time.monotonic()` time of the last check.
        left_at: The `time.monotonic()` time at which the failed workers were asked to leave the
            world; 0 if they were not.
    """

    futures: Sequence[Future[Any]]
    reason: str
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
    """The failed calls of one driver.

    Attributes:
        calls: The failed calls whose workers are still checked.
        world_error: Why the workers' world has ended; empty while it exists.
    """

    def __init__(self) -> None:
        self.calls: list[FailedCall] = []
        self.world_error = ""

    @property
    def is_decided(self) -> bool:
        """Whether it is known if the world has ended."""
        return not self.calls or bool(self.world_error)

    def add(self, futures: Sequence[Future[Any]], error: Exception) -> None:
        """Watch a call on all workers that has raised; add a note if the world has ended."""
        if self.world_error:
            error.add_note(self.world_error)
        else:
            self.calls.append(FailedCall(futures, str(error)))

    def proceed(self, workers: Sequence[WorkerHandle]) -> None:
        """Take the next step for each failed call; `workers` are in rank order."""
        for call in list(self.calls):
            busy = [workers[rank] for rank in call.busy()]
            failed = [workers[rank] for rank in call.failed()]
            # After the death of a worker, the backend reports it to the others.
            if (
                not busy
                or any(worker.lost for worker in failed)
                or self._release(call, busy, failed)
            ):
                self.calls.remove(call)

    def _release(
        self, call: FailedCall, busy: Sequence[WorkerHandle], failed: Sequence[WorkerHandle]
    ) -> bool:
        """Check or release busy workers; return whether nothing more can be done."""
        if call.left_at:  # leaving the world may not have helped
            is_late = time.monotonic() > call.left_at + SETTLE
            for worker in failed if is_late else ():
                worker.connection.post({"kind": "end"})
            return is_late
        if call.checks > CHECKS and all(worker.waits >= CHECKS for worker in busy):
            self.world_error = (
                f"the world of these workers has ended, because the others waited in a collective "
                f"after this error: {call.reason}; start new workers with driver.restart() and "
                "make the trainers again"
            )
            call.left_at = time.monotonic()
            for worker in failed:
                worker.connection.post({"kind": "leave"})
        elif call.start_check():
            for worker in busy:
                worker.waits = worker.waits if call.checks > 1 else 0
                worker.connection.post({"kind": "look"})
        return False


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
