"""The buffers of one contender on one rank, and its measurement loop.

    write the input ──> start barrier ──> clock ──> call ──> clock ──> next
                                                                last ──> check the output

Only the call itself is timed.

Inputs are small integers: a pattern that repeats after PERIOD elements, plus a number that depends
on the rank, on the part of the buffer and on the *variant*, which alternates from call to call. So
a call that does nothing is detected: it leaves the previous result. The period is prime, so that a
misplaced piece is wrong too. Sums are exact in any order.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator

import torch

from lockstep.tools.bench.measured_collectives import BufferPart, Collective

__all__ = ["PERIOD", "WorkloadBuffers", "make_pattern"]

PERIOD = 1009
VARIANTS = 2


def make_pattern(count: int) -> torch.Tensor:
    """Return the pattern of a part of `count` elements."""
    return torch.arange(count, dtype=torch.int32).remainder_(PERIOD).remainder_(4).float()


class WorkloadBuffers:
    """The buffers of one collective.

    Args:
        collective: The collective.
        pattern: The pattern of a part, on which the contents are based.
        rank: This rank.
        ranks: The number of ranks.
        is_shared: Whether the buffers are in memory that the ranks share.
    """

    def __init__(
        self,
        collective: Collective,
        pattern: torch.Tensor,
        rank: int,
        ranks: int,
        is_shared: bool = False,
    ) -> None:
        self._pattern = pattern
        self._ranks = ranks
        self.is_round_trip = collective.name == "send_recv"
        """Whether a call sends the message back and forth."""
        self._before = collective.before(rank, ranks)
        self._after = collective.after(rank, ranks)
        sent, received = (len(parts) * len(pattern) for parts in (self._before, self._after))
        if collective.is_in_place:
            self.send = _make_buffer(max(sent, received), is_shared)
            self.receive = self.send
        else:
            self.send, self.receive = (_make_buffer(count, is_shared) for count in (sent, received))

    def fill(self, variant: int) -> None:
        """Write the input of this rank."""
        for part, view in self._parts(self._before, self.send):
            torch.add(self._pattern, _number(part, variant), out=view)

    def count_wrong(self, variant: int) -> int:
        """Count the wrong elements of the output."""
        wrong = 0
        for part, view in self._parts(self._after, self.receive):
            expected = self._pattern + _number(part, variant)
            if part.rank is None:
                others = (
                    _number(BufferPart(rank, part.part), variant) for rank in range(self._ranks)
                )
                expected = self._pattern * self._ranks + sum(others)
            wrong += int((view != expected).sum())
        return wrong

    def _parts(
        self, contents: tuple[BufferPart, ...], buffer: torch.Tensor
    ) -> Iterator[tuple[BufferPart, torch.Tensor]]:
        count = len(self._pattern)
        for number, part in enumerate(contents):
            yield part, buffer[number * count : (number + 1) * count]

    def time_block(
        self, call: Callable[[], object], calls: int, wait_for_start: Callable[[], None]
    ) -> tuple[list[int], int]:
        """Time a block of calls after one warm-up call.

        Returns:
            The nanoseconds of each call, and the number of wrong elements after the last.
        """
        times = array("q", bytes(8 * (calls + 1)))
        clock = time.perf_counter_ns
        gc.disable()
        try:
            for turn in range(calls + 1):
                self.fill(turn % VARIANTS)
                wait_for_start()
                begin = clock()
                call()
                times[turn] = clock() - begin
        finally:
            gc.enable()
        return times.tolist()[1:], self.count_wrong(calls % VARIANTS)


def _make_buffer(count: int, is_shared: bool) -> torch.Tensor:
    """Return a vector of zeros with its pages touched."""
    if not is_shared:
        return torch.zeros(count)
    from lockstep.comm.shared_memory import empty_shared

    tensor: torch.Tensor = empty_shared(count)
    return tensor.zero_()


def _number(part: BufferPart, variant: int) -> int:
    """Return the number that is added to the pattern of a part."""
    return (part.rank or 0) * 5 + part.part * 11 + variant * 3
