"""The rounds of a measurement: contenders take turns, so that drift hits all alike.

    round 1   gloo  mpi  lockstep  memcpy        a block of calls each
    round 2   mpi  lockstep  memcpy  gloo        the next begins
    ...       until each has had its time

A call lasts as long as the rank that took longest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.bench.collectives import COLLECTIVES
from lockstep.bench.measure import Order
from lockstep.bench.peers import CopyPeer, Peer
from lockstep.bench.times import Timed

__all__ = ["Contender", "Result", "measure", "rotation"]

BLOCK = 6e3  # microseconds that a block should last
LONGEST = 100  # calls of a block at most
FEWEST = 15  # calls of a contender at least
MOST = 4000  # calls of a contender at most
ROUNDS = 3  # at least


@dataclass(frozen=True)
class Contender:
    """A line of the table: a peer, and what is special about its buffers."""

    name: str
    peer: Peer
    segment: bool = False


@dataclass(frozen=True)
class Result(Timed):
    """What one contender did at one size; `cannot` says why it did nothing."""

    contender: Contender
    order: Order
    ranks: int
    size: int
    times: tuple[float, ...] = ()  # microseconds, ascending
    wrong: int = 0
    cannot: str = ""

    @property
    def algbw(self) -> float:
        """The algorithm bandwidth in GB/s."""
        return self.size / self.median / 1e3

    @property
    def busbw(self) -> float:
        """The bus bandwidth in GB/s; a memory copy's is its algorithm bandwidth."""
        if is_copy(self.contender):
            return self.algbw
        return self.algbw * COLLECTIVES[self.order.collective].factor(self.ranks)


@dataclass
class Turns:
    """How far one contender has come."""

    contender: Contender
    order: Order
    calls: int = 1
    rounds: int = 0
    spent: float = 0.0
    wrong: int = 0
    cannot: str = ""
    times: list[float] | None = None

    def is_done(self, seconds: float) -> bool:
        """Whether it has had its time, or can't."""
        made = len(self.times or ())
        enough = made >= FEWEST and self.rounds >= ROUNDS
        return bool(self.cannot) or (enough and (self.spent >= seconds or made >= MOST))


def measure(
    contenders: list[Contender], order: Order, ranks: int, size: int, seconds: float
) -> list[Result]:
    """Measure `order` on every contender, about `seconds` each, and return their results.

    A contender that cannot do it has a reason in place of times. A rank that
    fails raises, and ends the measurement.
    """
    racing = [Turns(one, replace(order, segment=one.segment), times=[]) for one in contenders]
    for turns in racing:
        asked = whole(turns.order, ranks) if is_copy(turns.contender) else turns.order
        ask(turns, {"prepare": turns.contender.name, "order": asdict(asked)})
        warm_up(turns)
    for number in rotation(len(racing)):
        running = [turns for turns in racing if not turns.is_done(seconds)]
        if not running:
            break
        if racing[number] in running:
            run_block(racing[number])
    for turns in racing:
        turns.contender.peer.ask({"drop": turns.contender.name})
    return [result(turns, ranks, size) for turns in racing]


def rotation(count: int) -> Iterator[int]:
    """Yield turns for ever; each round begins with another contender."""
    first = 0
    while True:
        yield from ((first + step) % count for step in range(count))
        first += 1


def ask(turns: Turns, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask a contender's ranks; note why it cannot."""
    answers = turns.contender.peer.ask(message)
    turns.cannot = next((answer["cannot"] for answer in answers if "cannot" in answer), "")
    return answers


def is_copy(contender: Contender) -> bool:
    """Whether a contender is the memory copy, which knows no ranks and no parts."""
    return isinstance(contender.peer, CopyPeer)


def whole(order: Order, ranks: int) -> Order:
    """Return the order of a copy of as many bytes as the message has."""
    parts = ranks if COLLECTIVES[order.collective].is_cut else 1
    return replace(order, count=order.count * parts)


def slowest(turns: Turns, answers: list[dict[str, Any]]) -> list[float]:
    """Return each call's microseconds: the longest of all ranks, of a round trip the half."""
    is_round_trip = turns.order.collective == "send_recv" and not is_copy(turns.contender)
    scale = 2e3 if is_round_trip else 1e3
    by_call = zip(*(answer["times"] for answer in answers), strict=True)
    return [max(times) / scale for times in by_call]


def warm_up(turns: Turns) -> None:
    """Run a few calls, and find out how many make a block."""
    for _ in range(2):
        if turns.cannot:
            return
        answers = ask(turns, {"block": turns.contender.name, "calls": 2})
        if not turns.cannot:
            typical = statistics.median(slowest(turns, answers))
            turns.calls = max(1, min(LONGEST, round(BLOCK / max(typical, 1e-3))))


def run_block(turns: Turns) -> None:
    """Measure one block."""
    answers = ask(turns, {"block": turns.contender.name, "calls": turns.calls})
    if turns.cannot:
        return
    times = slowest(turns, answers)
    assert turns.times is not None
    turns.times += times
    turns.rounds += 1
    turns.spent += sum(times) / 1e6
    turns.wrong += sum(answer["wrong"] for answer in answers)


def result(turns: Turns, ranks: int, size: int) -> Result:
    """Return what a contender did."""
    times = tuple(sorted(turns.times or ())) if not turns.cannot else ()
    return Result(
        turns.contender, turns.order, ranks, size, times, turns.wrong, turns.cannot
    )  # fmt: skip
