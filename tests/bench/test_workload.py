"""Measurement loop of a rank: inputs rewritten, one call timed, results checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lockstep.tools.bench.measured_collectives import Part
from lockstep.tools.bench.torch_library import TorchLibrary
from lockstep.tools.bench.workload import (
    PERIOD,
    PreparedWorkload,
    Workload,
    expected_block,
)

COUNT = 2 * PERIOD + 5


class Alone(TorchLibrary):
    """Pretends to be rank 0 of two: it knows what the other rank would send."""

    def __init__(self, forgets: bool = False, misplaces: bool = False) -> None:
        self.calls = 0
        self.forgets = forgets
        self.misplaces = misplaces

    def call(
        self, workload: Workload, send: torch.Tensor, receive: torch.Tensor
    ) -> Callable[[], None]:
        assert workload.collective == "all_reduce"

        def reduce() -> None:
            other = expected_block(Part(1), 2, self.calls % 2)
            self.calls += 1
            if self.forgets and self.calls == 4:
                return
            mine = np.resize(other, len(receive)).astype(np.float32)
            receive.numpy()[:] += np.roll(mine, 1024) if self.misplaces else mine

        return reduce


def task(library: Alone) -> PreparedWorkload:
    return PreparedWorkload(library, Workload("all_reduce", COUNT), 0, 2)


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
