"""Futures: answers that have not come yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import LockstepError, RankError
from lockstep.launcher.failure_attribution import Outcome, is_consequence, make_rank_error

__all__ = ["SETTLE", "Future", "gather"]

SETTLE = 2.0  # seconds for what explains a lost connection to become known

Wait = Callable[[Callable[[], bool], float | None], None]
"""Waits until a condition holds or a `time.monotonic()` deadline passes."""


class Future:
    """The answer of one worker to one call, `what` in words."""

    def __init__(self, rank: int, what: str, wait: Wait) -> None:
        self.rank, self.what = rank, what
        self._wait = wait
        self._settled = threading.Event()
        self._value: Any = None
        self._failure: Outcome | None = None
        self._cause: BaseException | None = None

    def done(self) -> bool:
        """Whether the answer is here."""
        return self._settled.is_set()

    @property
    def failed(self) -> bool:
        """Whether the answer is an error."""
        return self._failure is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it.

        Raises RankError where the call raised or the worker ended, with the worker's
        traceback as a note; an error of lockstep's own kind stays of its kind.
        TimeoutError after `timeout` seconds: the call goes on, and may be waited
        for again.
        """
        self._wait(self.done, None if timeout is None else time.monotonic() + timeout)
        if not self.done():
            raise TimeoutError(
                f"{self.what} on rank {self.rank} has not ended within {timeout:g} s"
            )
        if self._failure is not None:
            raise explained([self])
        return self._value

    def __repr__(self) -> str:
        """Return "<Counter.add on rank 1: pending>"."""
        state = "pending" if not self.done() else "failed" if self._failure else "done"
        return f"<{self.what} on rank {self.rank}: {state}>"

    # --- from the side that hears the answer -------------------------------------------

    def succeed(self, value: Any) -> None:
        """Give it its value."""
        self._value = value
        self._settled.set()

    def fail(self, failure: Outcome, cause: BaseException | None = None) -> None:
        """Let it raise; `cause` is the exception itself, where that could travel."""
        self._failure, self._cause = failure, cause
        self._settled.set()


def gather(futures: Sequence[Future], wait: Wait) -> list[Any]:
    """Return every future's value; as soon as one fails, raise the failure that explains it."""

    def failures() -> list[Outcome]:
        return [future._failure for future in futures if future._failure is not None]

    def over() -> bool:
        return bool(failures()) or all(future.done() for future in futures)

    wait(over, None)
    if not failures():
        return [future._value for future in futures]
    wait(lambda: not all(map(is_consequence, failures())), time.monotonic() + SETTLE)
    raise explained(futures)


def explained(futures: Sequence[Future]) -> Exception:
    """Return the error of the failure that came first, causes before consequences."""
    failed = [future for future in futures if future._failure is not None]
    error = make_rank_error([future._failure for future in failed if future._failure])
    assert error is not None
    first = next(future for future in failed if future.rank == error.rank)
    if isinstance(first._cause, LockstepError) and not isinstance(first._cause, RankError):
        return type(first._cause)(str(first._cause))
    error.__cause__ = first._cause
    return error
