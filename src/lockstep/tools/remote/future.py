"""Futures: the results of calls that may not have returned yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lockstep.kernel.errors import LockstepError, RankError
from lockstep.launcher.failure_attribution import Outcome, is_consequence, make_rank_error

__all__ = ["SETTLE", "Future", "gather", "make_error"]

T = TypeVar("T")

SETTLE = 2.0  # seconds to wait for the cause of a lost connection

Wait = Callable[[Callable[[], bool], float | None], None]
"""Waits until a condition is true or a `time.monotonic()` deadline has passed."""


class Future(Generic[T]):
    """The result of one call on one worker.

    Attributes:
        rank: The worker.
        what: The description of the call in messages.
    """

    def __init__(self, rank: int, what: str, wait: Wait) -> None:
        self.rank, self.what = rank, what
        self._wait = wait
        self._settled = threading.Event()
        self._value: Any = None
        self._failure: Outcome | None = None
        self._cause: BaseException | None = None

    def done(self) -> bool:
        """Return whether the call has returned or failed."""
        return self._settled.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether the call has failed."""
        return self._failure is not None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call to return, and return its value.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            RankError: The call raised or the worker exited; the worker's traceback is a note,
                and the exception itself the cause if it could be sent. An error of Lockstep
                keeps its class.
            TimeoutError: The call has not returned. It continues, and you may wait for it again.
        """
        self._wait(self.done, None if timeout is None else time.monotonic() + timeout)
        if not self.done():
            raise TimeoutError(
                f"{self.what} on rank {self.rank} has not returned within {timeout:g} s"
            )
        if self._failure is not None:
            raise make_error([self])
        value: T = self._value
        return value

    def __repr__(self) -> str:
        """Return "<Counter.add on rank 1: pending>"."""
        state = "pending" if not self.done() else "failed" if self._failure else "done"
        return f"<{self.what} on rank {self.rank}: {state}>"

    # --- called when the answer arrives -------------------------------------------------

    def set_result(self, value: Any) -> None:
        """Set the value."""
        self._value = value
        self._settled.set()

    def set_failure(self, failure: Outcome, cause: BaseException | None = None) -> None:
        """Make `result` raise; `cause` is the exception itself, if it could be sent."""
        self._failure, self._cause = failure, cause
        self._settled.set()


def gather(futures: Sequence[Future[Any]], wait: Wait) -> list[Any]:
    """Return every future's value; when one fails, raise the error that is the cause."""

    def failures() -> list[Outcome]:
        return [future._failure for future in futures if future._failure is not None]

    def over() -> bool:
        return bool(failures()) or all(future.done() for future in futures)

    wait(over, None)
    if not failures():
        return [future._value for future in futures]
    wait(lambda: not all(map(is_consequence, failures())), time.monotonic() + SETTLE)
    raise make_error(futures)


def make_error(futures: Sequence[Future[Any]]) -> Exception:
    """Return the error of the first failure; causes take precedence over consequences."""
    failed = [future for future in futures if future._failure is not None]
    error = make_rank_error([future._failure for future in failed if future._failure])
    assert error is not None
    first = next(future for future in failed if future.rank == error.rank)
    if isinstance(first._cause, LockstepError) and not isinstance(first._cause, RankError):
        return type(first._cause)(str(first._cause))
    error.__cause__ = first._cause
    return error
