"""Measurement loop of a rank: inputs rewritten, one call timed, results checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.bench.collectives import COLLECTIVES, Part
from lockstep.bench.numpy_libraries import NumpyBuffers
from lockstep.bench.workload import (
    PERIOD,
    PreparedWorkload,
    UnsupportedError,
    Workload,
    expected_block,
)

COUNT = 2 * PERIOD + 5


class Alone(NumpyBuffers):
    """Pretends to be rank 0 of two: it knows what the other rank would send."""

    def __init__(self, forgets: bool = False, misplaces: bool = False) -> None:
        self.calls = 0
        self.forgets = forgets
        self.misplaces = misplaces

    def call(self, workload: Workload, send: np.ndarray, receive: np.ndarray) -> Callable[[], None]:
        assert workload.collective == "all_reduce"

        def reduce() -> None:
            other = expected_block(Part(1), 2, self.calls % 2, workload.op)
            self.calls += 1
            if self.forgets and self.calls == 4:
                return
            mine = np.resize(other, len(receive)).astype(receive.dtype)
            receive[:] += np.roll(mine, 1024) if self.misplaces else mine

        return reduce


def task(library: Alone) -> PreparedWorkload:
    return PreparedWorkload(library, Workload("all_reduce", COUNT, "float32", "SUM"), 0, 2)


def test_correct_results_count_no_errors():
    times, wrong = task(Alone()).time_block(3, lambda: None)
    assert len(times) == 3
    assert min(times) > 0
    assert wrong == 0


def test_call_that_does_nothing_is_detected():
    assert task(Alone(forgets=True)).time_block(3, lambda: None)[1] > COUNT // 2


def test_misplaced_piece_is_detected():
    assert task(Alone(misplaces=True)).time_block(3, lambda: None)[1] > COUNT // 2


def test_ranks_synchronize_between_fill_and_call():
    library = Alone()
    made = task(library)
    seen = []
    made.time_block(
        2, lambda: seen.append((library.calls, made.count_wrong(library.calls % 2) > 0))
    )
    assert seen == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("name", [name for name, one in COLLECTIVES.items() if one.can_alias])
def test_in_place_the_smaller_buffer_is_a_part_of_the_larger(name):
    held = {}

    class Holder(NumpyBuffers):
        def call(self, workload, send, receive):
            held.update(send=send, receive=receive)
            return lambda: None

    PreparedWorkload(Holder(), Workload(name, 10, "int32", "SUM", in_place=True), 1, 3)
    small, large = sorted(held.values(), key=len)
    assert (len(small), len(large)) == (10, 30)
    assert np.shares_memory(small, large[10:20])
    assert not np.shares_memory(small, large[:10])


def test_unsupported_dtype_raises():
    with pytest.raises(UnsupportedError, match="numpy has no bfloat16"):
        PreparedWorkload(Alone(), Workload("send_recv", 4, "bfloat16", "SUM"), 0, 2)
