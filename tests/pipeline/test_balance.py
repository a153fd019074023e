"""The balance of stages: no partition has a faster slowest stage."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lockstep.pipeline.balance import make_ranges, partition_blocks

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


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
    found = partition_blocks(blocks, boundaries, stages)
    assert [number for stage in found for number in stage] == list(range(len(blocks)))
    assert all(map(len, found))
    assert max(stage_costs(found, blocks, boundaries)) == min(
        max(stage_costs(each, blocks, boundaries)) for each in every_partition(len(blocks), stages)
    )


def test_the_more_even_partition_is_preferred() -> None:
    assert partition_blocks([9, 1, 1, 1, 1], [0] * 4, 3) == make_ranges([1, 2, 2])
