"""One rank measures: the same loop for every backend, torch's or MPI's.

    write the input ──> start line ──> clock ──> the call ──> clock ──> next
                                                                  last ──> check

Nothing between the clocks but the one call. Imports no torch: MPI's ranks have none.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.bench.collectives import COLLECTIVES, Held
from lockstep.bench.pattern import PERIOD, VARIANTS, Numbers, numbers

__all__ = ["CannotError", "Library", "Order", "Task"]


class CannotError(Exception):
    """A backend that cannot do what was ordered; the message says why."""


@dataclass(frozen=True)
class Order:
    """What to measure: a collective on parts of `count` elements."""

    collective: str
    count: int
    dtype: str
    op: str
    in_place: bool = False
    segment: bool = False


class Library(Protocol):
    """What measuring needs to know about tensors, torch's or numpy's."""

    def new(self, count: int, order: Order) -> Any:
        """Return a buffer of `count` elements; CannotError for a dtype it lacks."""

    def block(self, numbers: Numbers, order: Order) -> Any:
        """Return numbers in the order's dtype."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy `source` into `target`, with numpy's rules of broadcasting."""

    def wrong(self, got: Any, expected: Any, is_mean: bool) -> int:
        """Count elements that differ; a mean may differ by its last bit."""

    def call(self, order: Order, send: Any, receive: Any) -> Callable[[], object]:
        """Return the call to measure; CannotError where there is none."""


class Task:
    """An order with its buffers on one rank; `call` is what is measured."""

    def __init__(self, library: Library, order: Order, rank: int, ranks: int) -> None:
        collective = COLLECTIVES[order.collective]
        before, after = collective.before(rank, ranks), collective.after(rank, ranks)
        sent, received = len(before) * order.count, len(after) * order.count
        if collective.is_shared:
            send = receive = library.new(max(sent, received), order)
        elif order.in_place and sent > received:
            send = library.new(sent, order)
            receive = send[rank * received : (rank + 1) * received]
        elif order.in_place:
            receive = library.new(received, order)
            send = receive[rank * sent : (rank + 1) * sent]
        else:
            send, receive = library.new(sent, order), library.new(received, order)
        self.order = order
        self._library = library
        self._inputs = [tiles(library, send, before, order, ranks, v) for v in range(VARIANTS)]
        self._outputs = [tiles(library, receive, after, order, ranks, v) for v in range(VARIANTS)]
        self._is_mean = order.op == "AVG" and collective.reduces
        self.call = library.call(order, send, receive)

    def refill(self, variant: int) -> None:
        """Write this rank's input."""
        for target, block in self._inputs[variant]:
            self._library.copy(target, block)

    def wrong(self, variant: int) -> int:
        """Count the elements of the output that are not what they must be."""
        wrong = self._library.wrong
        return sum(wrong(got, block, self._is_mean) for got, block in self._outputs[variant])

    def block(self, calls: int, lineup: Callable[[], None]) -> tuple[list[int], int]:
        """Time `calls` calls after one that only settles; return nanoseconds and number wrong."""
        times = array("q", bytes(8 * (calls + 1)))
        clock, call, refill = time.perf_counter_ns, self.call, self.refill
        gc.disable()
        try:
            for turn in range(calls + 1):
                refill(turn % VARIANTS)
                lineup()
                begin = clock()
                call()
                times[turn] = clock() - begin
        finally:
            gc.enable()
        return times.tolist()[1:], self.wrong(calls % VARIANTS)


Tiles = list[tuple[Any, Any]]


def tiles(
    library: Library, buffer: Any, held: Held, order: Order, ranks: int, variant: int
) -> Tiles:
    """Return (place in the buffer, block) pairs that together fill it: rows, then the rest."""
    found = []
    for number, part in enumerate(held):
        block = library.block(numbers(part, ranks, variant, order.op), order)
        here = buffer[number * order.count : (number + 1) * order.count]
        whole = order.count - order.count % PERIOD
        if whole:
            found.append((here[:whole].reshape(-1, PERIOD), block))
        if whole < order.count:
            found.append((here[whole:], block[: order.count - whole]))
    return found
