"""Hang recovery: releases workers that wait in a collective for one that has raised.

    driver                          rank 1      rank 0
      │ <── error ──────────────────── raises,    │ all_reduce ...
      │ raised at once to the user     │ starts   │
      │                                │ no call  │
      │ ── end, after PATIENCE ──────> exits      │ "rank 1 has left the group"

Until all workers have returned from the call, those that raised start no other one: its
collectives would be paired with those of the failed call, and add values of two calls. The end
of a process releases the others in every backend; leaving the world is not enough for Gloo, whose
connections exist as long as anything holds the group, such as a trainer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.remote.calls import Future, make_error
from lockstep.tools.remote.roster import WorkerHandle

__all__ = ["PATIENCE", "HangRecovery"]

PATIENCE = 5.0  # seconds that a call may take on the others after it has failed on a worker


@dataclass(eq=False)
class SharedCall:
    """A call on all workers that has not returned on some of them.

    Attributes:
        number: The number of the call.
        futures: Its futures.
        failed_at: The `time.monotonic()` time at which it was seen to have failed; 0 before.
        is_released: Whether the workers on which it failed were asked to exit.
    """

    number: int
    futures: Sequence[Future[Any]]
    failed_at: float = 0.0
    is_released: bool = False

    def failed(self) -> list[int]:
        """Return the ranks on which the call failed."""
        return [future.rank for future in self.futures if future.has_failed]

    def is_open(self) -> bool:
        """Return whether the call has not returned on some ranks."""
        return not all(future.done() for future in self.futures)


class HangRecovery:
    """The calls of one driver on all workers.

    Attributes:
        world_error: Why the workers' world has ended; empty while it exists.
    """

    def __init__(self) -> None:
        self.world_error = ""
        self._cause: Sequence[Future[Any]] = ()  # the call whose error `world_error` quotes
        self._calls: list[SharedCall] = []

    @property
    def is_decided(self) -> bool:
        """Whether it is known if the world has ended."""
        is_open = any(call.failed() and call.is_open() for call in list(self._calls))
        return not is_open or bool(self.world_error)

    def watch(self, number: int, futures: Sequence[Future[Any]]) -> None:
        """Release workers if this call, on all of them, raises on some only."""
        self._calls.append(SharedCall(number, futures))

    def explain(self, error: Exception, futures: Sequence[Future[Any]] | None = None) -> None:
        """Add that the world has ended, and why, unless these futures are of the call that says it.

        Args:
            error: A later error.
            futures: Those of the call that it is of, if it is of one.
        """
        if self.world_error and futures is not self._cause:
            error.args = (f"{error}; {self.world_error}",)

    def proceed(self, workers: Sequence[WorkerHandle]) -> None:
        """Take the next step for each call; `workers` are in rank order."""
        for call in list(self._calls):
            failed = [workers[rank] for rank in call.failed()]
            if not call.is_open():
                self._calls.remove(call)
                for worker in failed:
                    worker.connection.post({"kind": "continue", "number": call.number})
            # After the death of a worker, the backend reports it to the others.
            elif failed and not call.is_released and not any(worker.lost for worker in failed):
                call.failed_at = call.failed_at or time.monotonic()
                if time.monotonic() > call.failed_at + PATIENCE:
                    self._release(call, failed)

    def _release(self, call: SharedCall, failed: Sequence[WorkerHandle]) -> None:
        call.is_released = True
        if not self.world_error:
            self._cause = call.futures
            self.world_error = (
                f"the world of these workers has ended, because the others had not returned "
                f"{PATIENCE:g} s after this error: {make_error(call.futures)}; start new workers "
                "with driver.restart() and make the trainers again"
            )
        for worker in failed:
            worker.connection.post({"kind": "end"})
