"""Simulation: the times of schedules, compared with sums by hand, and recorded steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.pipeline.schedules import NAMES, Action, build_schedule, gpipe, one_f_one_b
from lockstep.pipeline.simulation import (
    Costs,
    group_costs,
    simulate,
)

COST = st.integers(0, 9).map(float)


def random_costs(data, stages):
    """Draw costs of stages."""
    rows = [tuple(data.draw(COST) for _ in range(stages)) for _ in range(3)]
    return Costs(*rows, transfer=tuple(data.draw(COST) for _ in range(stages - 1)))


def test_two_ranks_added_up_by_hand() -> None:
    costs = Costs(forward=(1, 2), input=(1, 3), weight=(1, 1), transfer=(0.5,))
    found = simulate(gpipe(2, 2), costs)
    assert [(span.rank, str(span.action), span.begin, span.end) for span in found.spans] == [
        (0, "forward of micro-batch 0", 0, 1),
        (0, "forward of micro-batch 1", 1, 2),
        (0, "backward of micro-batch 0", 10, 12),
        (0, "backward of micro-batch 1", 14, 16),
        (1, "forward of micro-batch 0", 1.5, 3.5),
        (1, "forward of micro-batch 1", 3.5, 5.5),
        (1, "backward of micro-batch 0", 5.5, 9.5),
        (1, "backward of micro-batch 1", 9.5, 13.5),
    ]
    assert found.makespan == 16
    assert found.bubble == pytest.approx(1 - (6 + 12) / 32)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 12), st.data())
def test_no_rank_does_two_things_and_nothing_comes_before_its_cause(name, p, m, data) -> None:
    actions = build_schedule(name, p, m)
    stages = p * (2 if name == "interleaved" else 1)
    costs = random_costs(data, stages)
    found = simulate(actions, costs)
    at = {span.action: span for span in found.spans}
    for rank, own in enumerate(actions):
        ends = [0.0, *(at[action].end for action in own)]
        assert all(at[action].rank == rank for action in own)
        assert all(at[action].begin >= end for action, end in zip(own, ends, strict=False))
    for action, span in at.items():
        if action.kind == "forward" and action.stage:
            before = at[Action("forward", action.stage - 1, action.microbatch)]
            way = costs.transfer[action.stage - 1] if p > 1 else 0
            assert span.begin >= before.end + way
    busy = sum(span.end - span.begin for span in found.spans)
    assert found.bubble * found.makespan * p == pytest.approx(found.makespan * p - busy)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
def test_some_rank_is_never_faster_than_its_own_work(p: int, m: int, data) -> None:
    costs = random_costs(data, p)
    assert simulate(one_f_one_b(p, m), costs).makespan >= m * max(costs.totals)


def test_blocks_added_up_to_stages() -> None:
    blocks = Costs((1, 2, 3), (4, 5, 6), (7, 8, 9), (0.5, 0.25), (11, 12, 13), (1, 2, 4))
    ranges = [range(0, 2), range(2, 3)]
    assert group_costs(blocks, ranges) == Costs((3, 3), (9, 6), (15, 9), (0.25,), (23, 13), (3, 4))


def test_a_whole_backward_is_its_parts_unless_measured() -> None:
    assert Costs((1,), (2,), (3,)).backward == (5,)
    assert Costs((1,), (2,), (3,), backward=(4,)).totals == (5,)
