"""The schedule planner: the best partition, and the fastest schedule within a memory limit."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedule_planner import (
    choose_schedule,
    make_ranges,
    partition_blocks,
    plan_all_schedules,
)
from lockstep.pipeline.simulation import Costs

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def even(blocks, **others):
    """Return the costs of equal blocks."""
    return Costs((1,) * blocks, (1,) * blocks, (1,) * blocks, **others)


def test_1f1b_wins_where_splitting_costs_more() -> None:
    costs = Costs((1,) * 4, (2,) * 4, (2,) * 4, backward=(2,) * 4)
    assert choose_schedule(costs, ranks=4, microbatches=8).name == "1f1b"


def test_interleaved_wins_with_many_blocks_where_nothing_can_be_split() -> None:
    costs = Costs((1,) * 8, (2,) * 8, (2,) * 8, backward=(2,) * 8)
    chosen = choose_schedule(costs, ranks=4, microbatches=8)
    assert (chosen.name, chosen.stages_per_rank, len(chosen.ranges)) == ("interleaved", 2, 8)


@given(st.integers(1, 4), st.integers(1, 10), st.data())
def test_no_other_plan_is_more_than_a_hundredth_faster(ranks: int, m: int, data) -> None:
    rows = [tuple(data.draw(st.floats(0.1, 9)) for _ in range(8)) for _ in range(3)]
    costs = Costs(*rows, transfer=tuple(data.draw(st.floats(0, 1)) for _ in range(7)))
    chosen = choose_schedule(costs, ranks, m).simulation.makespan
    assert chosen * 0.99 <= min(
        one.simulation.makespan for one in plan_all_schedules(costs, ranks, m)
    )


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="2 blocks cannot be split into 3 stages"):
        choose_schedule(even(2), ranks=3, microbatches=4)


def stage_costs(ranges, blocks, boundaries):
    """Return the cost of each stage, by definition."""
    edges = [0, *boundaries, 0]
    return [sum(blocks[s.start : s.stop]) + edges[s.start] + edges[s.stop] for s in ranges]


def every_partition(blocks, stages):
    """Return all contiguous partitions."""
    for bounds in combinations(range(1, blocks), stages - 1):
        yield [range(lo, hi) for lo, hi in pairwise((0, *bounds, blocks))]


@given(COSTS, st.data())
def test_no_partition_is_better(blocks: list[int], data) -> None:
    boundaries = [data.draw(st.integers(0, 20)) for _ in blocks[1:]]
    stages = data.draw(st.integers(1, len(blocks)))
    found = stage_costs(partition_blocks(blocks, boundaries, stages), blocks, boundaries)
    others = [
        stage_costs(each, blocks, boundaries) for each in every_partition(len(blocks), stages)
    ]
    assert max(found) == min(map(max, others))


def test_the_more_even_partition_is_preferred() -> None:
    assert partition_blocks([9, 1, 1, 1, 1], [0] * 4, 3) == make_ranges([1, 2, 2])


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=12), st.data())
def test_the_stages_are_contiguous_and_not_empty(blocks: list[float], data) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    ranges = partition_blocks(blocks, [], stages)
    assert len(ranges) == stages
    assert all(ranges)
    assert [block for stage in ranges for block in stage] == list(range(len(blocks)))


def test_the_example_in_the_docstring_of_the_module() -> None:
    assert partition_blocks([3, 1, 4, 1, 5], [1, 9, 1, 1], 2) == [range(0, 3), range(3, 5)]


def test_ranges_follow_the_given_sizes() -> None:
    assert make_ranges([3, 2]) == [range(0, 3), range(3, 5)]
