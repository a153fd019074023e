"""Calls: what this process has asked others to do, and the answers it waits for."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from lockstep.errors import UsageError
from lockstep.launcher.failure_attribution import Outcome
from lockstep.remote.frame import Frame
from lockstep.remote.future import Future, Wait
from lockstep.remote.objects import Address, Tokens
from lockstep.remote.reference import Remote
from lockstep.remote.serialization import pack, unpack

__all__ = ["DRIVER", "Calls", "Routes", "ended"]

DRIVER = -1  # the driver's rank, which is outside the world


class Routes(Protocol):
    """How frames get from this process to another one."""

    def post(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank; UsageError or RankError where that cannot be."""

    def post_drop(self, address: Address) -> None:
        """Tell the owner of a dropped reference; called from destructors, so it must not wait."""


class Calls:
    """The calls of process `rank` (the driver: -1); `wait` is how it waits for answers."""

    def __init__(self, rank: int, routes: Routes, wait: Wait) -> None:
        self.rank, self.wait = rank, wait
        self._routes = routes
        self._tokens = Tokens(rank)
        self._numbers = itertools.count()
        self._pending: dict[tuple[int, int], Future] = {}  # by the rank that must answer
        self.resolve: Callable[[Address], Any] = self.reference

    def start(
        self,
        to: int,
        what: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        *,
        keep: bool = False,
    ) -> Future:
        """Ask rank `to` to call `function(*args, **options)`; `what` says it in words.

        With `keep` the value stays there, and the future's is a reference to it.
        Raises UsageError where the function or an argument cannot travel.
        """
        lends: list[tuple[int, int]] = []
        pieces = self._packed(to, what, (function, tuple(args), dict(options or {})), lends)
        number, future = next(self._numbers), Future(to, what, self.wait)
        self._pending[to, number] = future
        header = {"kind": "call", "number": number, "keep": keep, "lends": lends}
        try:
            self._routes.post(to, Frame(header, pieces))
        except BaseException:
            del self._pending[to, number]
            raise
        return future

    def pack(self, to: int, value: Any) -> Sequence[memoryview]:
        """Return the pieces of an answer for rank `to`."""
        return pack(value, lambda address: self._lent(address, to, None))

    def unpack(self, pieces: Sequence[memoryview]) -> Any:
        """Return the value of what another process packed."""
        return unpack(pieces, self.resolve)

    def settle(self, rank: int, frame: Frame) -> None:
        """Take in an answer of `rank`; one to a call that was made to another rank is ignored."""
        future = self._pending.pop((rank, frame.header["number"]), None)
        if future is None:
            return
        try:
            if frame.kind == "kept":
                future.succeed(self.reference(Address(**frame.header["address"])))
            elif frame.kind == "value":
                future.succeed(self.unpack(frame.pieces))
            else:
                self._fail(future, frame)
        except Exception as error:  # what cannot be unpacked here
            how = f"sent a value that cannot be read here: {type(error).__name__}: {error}"
            future.fail(ended(future.rank, how))

    def lose(self, outcome: Outcome) -> None:
        """Let everything fail that waits for a worker that ended."""
        for call, future in list(self._pending.items()):
            if future.rank == outcome.rank and call in self._pending:
                del self._pending[call]
                future.fail(outcome)

    def reference(self, address: Address) -> Remote:
        """Return the reference that an address stands for."""
        return Remote(address, self)

    def drop(self, address: Address) -> None:
        """Tell the owner that this reference is held no more; safe in a destructor."""
        self._routes.post_drop(address)

    def awaited(self) -> list[Future]:
        """Return the futures whose answers have not come yet."""
        return list(self._pending.values())

    def _fail(self, future: Future, frame: Frame) -> None:
        try:
            cause = self.unpack(frame.pieces) if frame.pieces else None
        except Exception:  # an exception whose class is not here
            cause = None
        future.fail(Outcome(future.rank, error=frame.header["report"]), cause)

    def _packed(
        self, to: int, what: str, call: tuple[Any, ...], lends: list[tuple[int, int]]
    ) -> Sequence[memoryview]:
        lent: list[Address] = []

        def lend(address: Address) -> Address:
            lent.append(self._lent(address, to, lends))
            return lent[-1]

        try:
            return pack(call, lend)
        except (pickle.PicklingError, TypeError, AttributeError, UsageError) as error:
            for address in lent:
                if address.owner != to:
                    self.drop(address)
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{what} cannot be sent to rank {to}: {_culprit(call)} cannot travel: {error}"
            ) from error

    def _lent(self, address: Address, to: int, lends: list[tuple[int, int]] | None) -> Address:
        """Lend a reference to rank `to`: along with the call where that is its owner."""
        token = self._tokens.new()
        if address.owner == to and lends is not None:
            lends.append((address.number, token))
        else:
            header = {"kind": "lend", "object": address.number, "token": token, "holder": to}
            self._routes.post(address.owner, Frame(header))
        return replace(address, token=token)


def ended(rank: int, how: str, status: int | None = None) -> Outcome:
    """Return the outcome of a worker that ended without an answer, `how` in words."""
    report = {
        "time": time.monotonic(),
        "type": "",
        "message": f"rank {rank} {how}",
        "where": "",
        "traceback": "",
        "plain": True,
    }
    return Outcome(rank, status=status, error=report)


def _culprit(call: tuple[Any, ...]) -> str:
    """Say which part of a call cannot be pickled."""
    function, args, options = call
    parts = {"the function": function}
    parts |= {
        f"argument {position} ({_named(each)})": each for position, each in enumerate(args, 1)
    }
    parts |= {f"argument {name} ({_named(each)})": each for name, each in options.items()}
    for words, part in parts.items():
        try:
            pack(part, lambda address: address)
        except Exception:  # whatever its pickling raises: it is the one
            return _named(part) if words == "the function" else words
    return "it"


def _named(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    return str(name) if name else f"of class {type(thing).__qualname__}"
