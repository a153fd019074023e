"""The choice: the fastest plan by the simulator, within a limit of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LayoutError
from lockstep.pipeline.choice import choose, plan, plans
from lockstep.pipeline.simulation import Costs


def even(blocks, **others):
    """Return the costs of equal blocks."""
    return Costs((1,) * blocks, (1,) * blocks, (1,) * blocks, **others)


def test_zero_bubble_wins_where_splitting_costs_nothing() -> None:
    assert choose(even(4), ranks=4, microbatches=8).name == "zero-bubble"


def test_1f1b_wins_where_splitting_costs_more() -> None:
    costs = Costs((1,) * 4, (2,) * 4, (2,) * 4, backward=(2,) * 4)
    assert choose(costs, ranks=4, microbatches=8).name == "1f1b"


def test_interleaved_wins_with_many_blocks_where_nothing_can_be_split() -> None:
    costs = Costs((1,) * 8, (2,) * 8, (2,) * 8, backward=(2,) * 8)
    chosen = choose(costs, ranks=4, microbatches=8)
    assert (chosen.name, chosen.stages_per_rank, len(chosen.cut)) == ("interleaved", 2, 8)


def test_ties_go_to_1f1b() -> None:
    assert choose(even(4), ranks=1, microbatches=8).name == "1f1b"


@given(st.integers(1, 4), st.integers(1, 10), st.data())
def test_no_other_plan_is_more_than_a_hundredth_faster(ranks: int, m: int, data) -> None:
    rows = [tuple(data.draw(st.floats(0.1, 9)) for _ in range(8)) for _ in range(3)]
    costs = Costs(*rows, transfer=tuple(data.draw(st.floats(0, 1)) for _ in range(7)))
    chosen = choose(costs, ranks, m).simulation.makespan
    assert chosen * 0.99 <= min(one.simulation.makespan for one in plans(costs, ranks, m))


def test_the_limit_of_memory_is_kept() -> None:
    costs = Costs((1,) * 8, (2,) * 8, (2,) * 8, backward=(2,) * 8, held=(10.0,) * 8)
    free = choose(costs, ranks=4, microbatches=8)
    tight = choose(costs, ranks=4, microbatches=8, memory=80)
    assert (free.name, max(free.simulation.peaks)) == ("interleaved", 110)
    assert (tight.name, max(tight.simulation.peaks)) == ("1f1b", 80)
    with pytest.raises(LayoutError, match=r"holds activations of 80 or more .* limit is 79"):
        choose(costs, ranks=4, microbatches=8, memory=79)


def test_a_cut_by_hand_is_kept() -> None:
    by_hand = [range(0, 1), range(1, 4)]
    assert plan("1f1b", even(4), 2, 4, cut=by_hand).cut == tuple(by_hand)
    with pytest.raises(LayoutError, match="costs of 2 stages for a schedule of 4"):
        plan("interleaved", even(4), 2, 4, cut=by_hand)


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="2 blocks cannot be cut into 3 stages"):
        choose(even(2), ranks=3, microbatches=4)
