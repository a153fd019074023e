"""One rank's loop: inputs anew, one call between the clocks, answers checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.bench.collectives import COLLECTIVES, Part
from lockstep.bench.measure import CannotError, Order, Task
from lockstep.bench.numpy_calls import CopyLibrary, NumpyBuffers
from lockstep.bench.pattern import PERIOD, numbers

COUNT = 2 * PERIOD + 5


class Alone(NumpyBuffers):
    """Pretends to be rank 0 of two: it knows what the other rank would send."""

    def __init__(self, forgets: bool = False, misplaces: bool = False) -> None:
        self.calls = 0
        self.forgets = forgets
        self.misplaces = misplaces

    def call(self, order: Order, send: np.ndarray, receive: np.ndarray) -> Callable[[], None]:
        assert order.collective == "all_reduce"

        def reduce() -> None:
            other = numbers(Part(1), 2, self.calls % 2, order.op)
            self.calls += 1
            if self.forgets and self.calls == 4:
                return
            mine = np.resize(other, len(receive)).astype(receive.dtype)
            receive[:] += np.roll(mine, 1024) if self.misplaces else mine

        return reduce


def task(library: Alone) -> Task:
    return Task(library, Order("all_reduce", COUNT, "float32", "SUM"), 0, 2)


def test_right_answers_are_right():
    times, wrong = task(Alone()).block(3, lambda: None)
    assert len(times) == 3
    assert min(times) > 0
    assert wrong == 0


def test_a_call_that_does_nothing_shows():
    assert task(Alone(forgets=True)).block(3, lambda: None)[1] > COUNT // 2


def test_a_piece_in_the_wrong_place_shows():
    assert task(Alone(misplaces=True)).block(3, lambda: None)[1] > COUNT // 2


def test_ranks_line_up_after_writing_and_before_the_call():
    library = Alone()
    made = task(library)
    seen = []
    made.block(2, lambda: seen.append((library.calls, made.wrong(library.calls % 2) > 0)))
    assert seen == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("name", [name for name, one in COLLECTIVES.items() if one.can_alias])
def test_in_place_the_smaller_buffer_is_a_part_of_the_larger(name):
    held = {}

    class Holder(NumpyBuffers):
        def call(self, order, send, receive):
            held.update(send=send, receive=receive)
            return lambda: None

    Task(Holder(), Order(name, 10, "int32", "SUM", in_place=True), 1, 3)
    small, large = sorted(held.values(), key=len)
    assert (len(small), len(large)) == (10, 30)
    assert np.shares_memory(small, large[10:20])
    assert not np.shares_memory(small, large[:10])


def test_a_copy_is_checked_like_a_message():
    made = Task(CopyLibrary(), Order("send_recv", COUNT, "uint8", "SUM"), 0, 2)
    made.refill(0)
    made.call()
    # A copy brings this rank's own numbers, not those of a partner.
    assert made.wrong(0) > 0


def test_a_dtype_that_numpy_lacks_is_said():
    with pytest.raises(CannotError, match="numpy has no bfloat16"):
        Task(CopyLibrary(), Order("send_recv", 4, "bfloat16", "SUM"), 0, 2)
