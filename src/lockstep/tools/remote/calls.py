"""Calls: the requests of the driver to its workers, and futures for their results."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from lockstep.kernel.errors import CommunicationError, LockstepError, RankError, UsageError
from lockstep.launcher.failure_attribution import (
    Outcome,
    is_consequence,
    make_rank_error,
    make_report,
)
from lockstep.tools.remote.connection import RemoteMessage
from lockstep.tools.remote.serialization import serialize

__all__ = ["SETTLE", "Calls", "Future", "await_results", "make_error", "make_lost_outcome"]

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
        self.rank = rank
        self.what = what
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
                keeps its class, unless it is about the communication of the ranks.
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
        self._failure = failure
        self._cause = cause
        self._settled.set()


def await_results(futures: Sequence[Future[Any]], wait: Wait) -> list[Any]:
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
    # A failure of a rank, or of the communication between ranks, is one of the workers.
    of_workers = RankError, CommunicationError
    if isinstance(first._cause, LockstepError) and not isinstance(first._cause, of_workers):
        return type(first._cause)(str(first._cause))
    error.__cause__ = first._cause
    return error


class Calls:
    """The calls of one driver.

    Args:
        post: Sends a message to a rank; raises UsageError or RankError if that is not possible.
        wait: Waits for answers.
        watch: Called with the number and the futures of each call on several ranks.
    """

    def __init__(
        self,
        post: Callable[[int, RemoteMessage], None],
        wait: Wait,
        watch: Callable[[int, Sequence[Future[Any]]], None],
    ) -> None:
        self._post = post
        self._wait = wait
        self._watch = watch
        self._numbers = itertools.count()
        self._pending: dict[tuple[int, int], Future[Any]] = {}  # by the rank that must answer

    def start(
        self,
        ranks: Sequence[int],
        what: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[Future[Any]]:
        """Ask ranks to call `function(*args, **options)`, which is serialized once.

        Args:
            ranks: The ranks.
            what: The description of the call in messages.
            function: The function; it is sent along.
            args: Its positional arguments.
            options: Its keyword arguments.

        Raises:
            UsageError: The function or an argument cannot be pickled.
        """
        try:
            payload = serialize((function, tuple(args), dict(options or {})))
        except (pickle.PickleError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{what} and its arguments cannot be sent to rank {ranks[0]}: {error}"
            ) from error
        message: RemoteMessage = {"kind": "call", "number": next(self._numbers), "payload": payload}
        message["is_shared"] = len(ranks) > 1
        futures: list[Future[Any]] = []
        try:
            for rank in ranks:
                futures.append(self._start(rank, what, message))
        finally:  # also if a rank is lost: the others have the call, and one that raises waits
            if message["is_shared"]:
                self._watch(message["number"], futures)
        return futures

    def on_answer(self, rank: int, message: RemoteMessage) -> None:
        """Process an answer of `rank`; answers to calls to other ranks are ignored."""
        future = self._pending.pop((rank, message["number"]), None)
        if future is None:
            return
        try:
            value = pickle.loads(message["payload"]) if "payload" in message else None
        except Exception as error:  # the value, or the class of the exception, is unknown here
            value = None
            reason = f"{type(error).__name__}: {error}"
            if message["kind"] == "value":
                reason = f"sent a value that cannot be unpickled: {reason}"
                future.set_failure(make_lost_outcome(rank, reason))
                return
        if message["kind"] == "value":
            future.set_result(value)
        else:
            future.set_failure(Outcome(rank, error=message["report"]), value)

    def fail_calls(self, outcome: Outcome) -> None:
        """Fail all calls to a worker that has exited."""
        for call, future in list(self._pending.items()):
            if future.rank == outcome.rank and call in self._pending:
                del self._pending[call]
                future.set_failure(outcome)

    def pending(self) -> list[Future[Any]]:
        """Return the futures of calls that have not returned yet."""
        return list(self._pending.values())

    def _start(self, rank: int, what: str, message: RemoteMessage) -> Future[Any]:
        future: Future[Any] = Future(rank, what, self._wait)
        self._pending[rank, message["number"]] = future
        try:
            self._post(rank, message)
        except BaseException:
            del self._pending[rank, message["number"]]
            raise
        return future


def make_lost_outcome(rank: int, reason: str, status: int | None = None) -> Outcome:
    """Return the outcome of a worker that gives no answer; `reason` is a predicate for it."""
    return Outcome(rank, status=status, error=make_report("", f"rank {rank} {reason}"))
