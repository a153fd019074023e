"""The buffers of a rank: inputs rewritten, one call timed, results checked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.tools.bench.measured_collectives import COLLECTIVES, BufferPart
from lockstep.tools.bench.workload import PERIOD, WorkloadBuffers, make_pattern

COUNT = 2 * PERIOD + 5


def as_rank_0_of_two(
    forgets: bool = False, misplaces: bool = False
) -> tuple[WorkloadBuffers, Callable[[], None]]:
    """Return the buffers of an all_reduce, and a call that knows what the other rank would send."""
    pattern = make_pattern(COUNT)
    buffers = WorkloadBuffers(COLLECTIVES["all_reduce"], pattern, 0, 2)
    calls = []

    def reduce() -> None:
        other = pattern + 5 + 3 * (len(calls) % 2)  # rank 1
        calls.append(None)
        if not (forgets and len(calls) == 4):
            buffers.receive.add_(other.roll(1024) if misplaces else other)

    return buffers, reduce


def test_correct_results_count_no_errors() -> None:
    buffers, call = as_rank_0_of_two()
    times, wrong = buffers.time_block(call, 3, lambda: None)
    assert len(times) == 3
    assert min(times) > 0
    assert wrong == 0


def test_call_that_does_nothing_is_detected() -> None:
    buffers, call = as_rank_0_of_two(forgets=True)
    assert buffers.time_block(call, 3, lambda: None)[1] > COUNT // 2


def test_misplaced_piece_is_detected() -> None:
    buffers, call = as_rank_0_of_two(misplaces=True)
    assert buffers.time_block(call, 3, lambda: None)[1] > COUNT // 2


def test_parts_have_different_contents() -> None:
    collective = COLLECTIVES["all_to_all"]
    buffers = WorkloadBuffers(collective, make_pattern(4), 1, 3)
    buffers.fill(0)
    assert [part.part for part in collective.before(1, 3)] == [0, 1, 2]
    assert len({int(value) for value in buffers.send[::4]}) == 3
    assert collective.after(1, 3)[2] == BufferPart(2, 1)
    assert torch.equal(buffers.receive, torch.zeros(12))
    assert buffers.count_wrong(0) > 0
