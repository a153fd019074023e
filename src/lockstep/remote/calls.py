"""Calls: the requests of this process to others, and the answers that it waits for."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lockstep.kernel.errors import UsageError
from lockstep.launcher.failure_attribution import Outcome
from lockstep.remote.future import Future, Wait
from lockstep.remote.objects import ObjectAddress, RemoteObject, TokenCounter
from lockstep.remote.serialization import deserialize, serialize
from lockstep.transport.frame import Frame

__all__ = ["DRIVER", "Calls", "Transport", "make_lost_outcome"]

DRIVER = -1  # the driver's rank, which is outside the world


class Transport(Protocol):
    """The way of frames from this process to others."""

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank; raise UsageError or RankError if that is not possible."""

    def post_drop(self, address: ObjectAddress) -> None:
        """Notify the owner of a dropped reference; called in destructors, so it must not wait."""


class Calls:
    """The calls that one process makes.

    Args:
        rank: The rank of this process; -1 is the driver.
        transport: Sends its frames.
        wait: Waits for answers.
    """

    def __init__(self, rank: int, transport: Transport, wait: Wait) -> None:
        self.rank, self.wait = rank, wait
        self._transport = transport
        self._tokens = TokenCounter(rank)
        self._numbers = itertools.count()
        self._pending: dict[tuple[int, int], Future[Any]] = {}  # by the rank that must answer
        self.resolve: Callable[[ObjectAddress], Any] = self.reference

    def start(
        self,
        to: int,
        what: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        *,
        keep: bool = False,
    ) -> Future[Any]:
        """Ask rank `to` to call `function(*args, **options)`.

        Args:
            to: The rank.
            what: The description of the call in messages.
            function: The function; it is sent along.
            args: Its positional arguments.
            options: Its keyword arguments.
            keep: Whether the value stays there; the future's value is then a reference to it.

        Raises:
            UsageError: The function or an argument cannot be pickled.
        """
        lends: list[tuple[int, int]] = []
        pieces = self._serialize_call(to, what, (function, tuple(args), dict(options or {})), lends)
        number = next(self._numbers)
        future: Future[Any] = Future(to, what, self.wait)
        self._pending[to, number] = future
        header = {"kind": "call", "number": number, "keep": keep, "lends": lends}
        try:
            self._transport.post(to, Frame(header, pieces))
        except BaseException:
            del self._pending[to, number]
            raise
        return future

    def serialize(self, to: int, value: Any) -> Sequence[memoryview]:
        """Return the pieces of an answer for rank `to`."""
        return serialize(value, lambda address: self._lend(address, to, None))

    def deserialize(self, pieces: Sequence[memoryview]) -> Any:
        """Return the value that another process has serialized."""
        return deserialize(pieces, self.resolve)

    def on_answer(self, rank: int, frame: Frame) -> None:
        """Process an answer of `rank`; answers to calls to other ranks are ignored."""
        future = self._pending.pop((rank, frame.header["number"]), None)
        if future is None:
            return
        try:
            if frame.kind == "kept":
                future.set_result(self.reference(ObjectAddress(**frame.header["address"])))
            elif frame.kind == "value":
                future.set_result(self.deserialize(frame.pieces))
            else:
                self._set_failure(future, frame)
        except Exception as error:  # the value cannot be unpickled here
            reason = f"sent a value that cannot be unpickled: {type(error).__name__}: {error}"
            future.set_failure(make_lost_outcome(future.rank, reason))

    def fail_calls(self, outcome: Outcome) -> None:
        """Fail all calls to a worker that has exited."""
        for call, future in list(self._pending.items()):
            if future.rank == outcome.rank and call in self._pending:
                del self._pending[call]
                future.set_failure(outcome)

    def reference(self, address: ObjectAddress) -> RemoteObject:
        """Return a reference for an address."""
        return RemoteObject(address, self)

    def drop(self, address: ObjectAddress) -> None:
        """Notify the owner that a reference is gone; safe in a destructor."""
        self._transport.post_drop(address)

    def pending(self) -> list[Future[Any]]:
        """Return the futures of calls that have not returned yet."""
        return list(self._pending.values())

    def _set_failure(self, future: Future[Any], frame: Frame) -> None:
        try:
            cause = self.deserialize(frame.pieces) if frame.pieces else None
        except Exception:  # the class of the exception does not exist here
            cause = None
        future.set_failure(Outcome(future.rank, error=frame.header["report"]), cause)

    def _serialize_call(
        self, to: int, what: str, call: tuple[Any, ...], lends: list[tuple[int, int]]
    ) -> Sequence[memoryview]:
        lent: list[ObjectAddress] = []

        def lend(address: ObjectAddress) -> ObjectAddress:
            lent.append(self._lend(address, to, lends))
            return lent[-1]

        try:
            return serialize(call, lend)
        except (pickle.PicklingError, TypeError, AttributeError, UsageError) as error:
            for address in lent:
                if address.owner != to:
                    self.drop(address)
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{what} cannot be sent to rank {to}: {_find_culprit(call)} cannot be pickled: "
                f"{error}"
            ) from error

    def _lend(
        self, address: ObjectAddress, to: int, lends: list[tuple[int, int]] | None
    ) -> ObjectAddress:
        """Lend a reference to rank `to`; if `to` is its owner, the call carries the new token."""
        token = self._tokens.new()
        if address.owner == to and lends is not None:
            lends.append((address.number, token))
        else:
            header = {"kind": "lend", "object": address.number, "token": token, "holder": to}
            self._transport.post(address.owner, Frame(header))
        return replace(address, token=token)


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


def _find_culprit(call: tuple[Any, ...]) -> str:
    """Return which part of a call cannot be pickled."""
    function, args, options = call
    parts = {"the function": function}
    parts |= {
        f"argument {position} ({_describe(each)})": each for position, each in enumerate(args, 1)
    }
    parts |= {f"argument {name} ({_describe(each)})": each for name, each in options.items()}
    for name, part in parts.items():
        try:
            serialize(part, lambda address: address)
        except Exception:  # pickling may raise any exception
            return _describe(part) if name == "the function" else name
    return "it"


def _describe(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    return str(name) if name else f"of class {type(thing).__qualname__}"
