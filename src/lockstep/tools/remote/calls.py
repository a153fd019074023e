"""Calls: the requests of the driver to its workers, and the answers that it waits for."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.kernel.errors import UsageError
from lockstep.launcher.failure_attribution import Outcome
from lockstep.tools.remote.future import Future, Wait
from lockstep.tools.remote.serialization import serialize

__all__ = ["Calls", "make_lost_outcome"]

Message = dict[str, Any]


class Calls:
    """The calls of one driver.

    Args:
        post: Sends a message to a rank; raises UsageError or RankError if that is not possible.
        wait: Waits for answers.
        watch: Called with the number and the futures of each call on several ranks.
    """

    def __init__(
        self,
        post: Callable[[int, Message], None],
        wait: Wait,
        watch: Callable[[int, Sequence[Future[Any]]], None],
    ) -> None:
        self._post, self._wait, self._watch = post, wait, watch
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
        message: Message = {"kind": "call", "number": next(self._numbers), "payload": payload}
        message["is_shared"] = len(ranks) > 1
        futures: list[Future[Any]] = []
        try:
            for rank in ranks:
                futures.append(self._start(rank, what, message))
        finally:  # also if a rank is lost: the others have the call, and one that raises waits
            if message["is_shared"]:
                self._watch(message["number"], futures)
        return futures

    def on_answer(self, rank: int, message: Message) -> None:
        """Process an answer of `rank`; answers to calls to other ranks are ignored."""
        future = self._pending.pop((rank, message["number"]), None)
        if future is None:
            return
        try:
            value = pickle.loads(message["payload"]) if "payload" in message else None
        except Exception as error:  # the value, or the class of the exception, is unknown here
            value, reason = None, f"{type(error).__name__}: {error}"
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

    def _start(self, rank: int, what: str, message: Message) -> Future[Any]:
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
    report = {
        "time": time.monotonic(),
        "type": "",
        "message": f"rank {rank} {reason}",
        "where": "",
        "traceback": "",
        "plain": True,
    }
    return Outcome(rank, status=status, error=report)
