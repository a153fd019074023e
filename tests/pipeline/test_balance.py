"""The balance: no cut beats the one that was found."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LayoutError
from lockstep.pipeline.balance import partition, ranges

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def stage_costs(cut, blocks, boundaries):
    """Return what each stage costs, by the definition."""
    edges = [0, *boundaries, 0]
    return [sum(blocks[s.start : s.stop]) + edges[s.start] + edges[s.stop] for s in cut]


def every_cut(blocks, stages):
    """Return all contiguous cuts."""
    for bounds in combinations(range(1, blocks), stages - 1):
        yield [range(lo, hi) for lo, hi in pairwise((0, *bounds, blocks))]


@given(COSTS, st.data())
def test_no_cut_beats_it(blocks: list[int], data) -> None:
    boundaries = [data.draw(st.integers(0, 20)) for _ in blocks[1:]]
    stages = data.draw(st.integers(1, len(blocks)))
    found = stage_costs(partition(blocks, boundaries, stages), blocks, boundaries)
    others = [stage_costs(cut, blocks, boundaries) for cut in every_cut(len(blocks), stages)]
    slowest = min(map(max, others))
    assert max(found) == slowest
    even = min(sum(c * c for c in costs) for costs in others if max(costs) == slowest)
    assert sum(c * c for c in found) == even


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=12), st.data())
def test_the_stages_are_contiguous_and_not_empty(blocks: list[float], data) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    cut = partition(blocks, [], stages)
    assert len(cut) == stages
    assert all(cut)
    assert [block for stage in cut for block in stage] == list(range(len(blocks)))


def test_the_drawing_at_the_top_of_the_module() -> None:
    assert partition([3, 1, 4, 1, 5], [1, 9, 1, 1], 2) == [range(0, 3), range(3, 5)]


def test_an_expensive_boundary_is_not_cut() -> None:
    assert partition([1, 1, 1, 1], [0, 50, 0], 2) != [range(0, 2), range(2, 4)]
    assert partition([1, 1, 1, 1], [0, 0, 0], 2) == [range(0, 2), range(2, 4)]


def test_of_equal_cuts_the_first_stages_are_larger() -> None:
    assert partition([1] * 5, [], 3) == ranges([2, 2, 1])


def test_a_balance_by_hand() -> None:
    assert ranges([3, 2]) == [range(0, 3), range(3, 5)]


@pytest.mark.parametrize(
    ("blocks", "boundaries", "stages", "sentence"),
    [
        ([1, 1], [], 3, "2 blocks cannot be cut into 3 stages"),
        ([1, 1], [], 0, "into 0 stages"),
        ([1, 1], [1, 1], 2, "2 blocks have 1 boundaries, not 2"),
        ([1, float("inf")], [], 2, "costs inf"),
        ([1, 1], [-2], 2, "costs -2"),
    ],
)
def test_what_cannot_be_cut_is_refused(blocks, boundaries, stages, sentence) -> None:
    with pytest.raises(LayoutError, match=sentence):
        partition(blocks, boundaries, stages)
