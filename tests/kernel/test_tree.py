"""The tree: pure arithmetic on leaves."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import TreeAccumulator, nodes_of, split, total

LEAVES = st.integers(1, 40)


def test_split_is_at_the_largest_power_of_two_below() -> None:
    assert [split(0, width) for width in range(2, 10)] == [1, 2, 2, 4, 4, 4, 4, 8]
    assert split(4, 7) == 6


def test_eight_leaves_on_three_ranks_as_the_page_about_the_guarantee_says() -> None:
    assert [nodes_of(owned, 8) for owned in split_evenly(8, 3)] == [
        [(0, 2), (2, 3)],
        [(3, 4), (4, 6)],
        [(6, 8)],
    ]


def written(node: tuple[int, int]) -> str:
    """Write a node out by the definition, independently of `TreeAccumulator`."""
    lo, hi = node
    if hi - lo == 1:
        return str(lo)
    mid = split(lo, hi)
    return f"({written((lo, mid))}+{written((mid, hi))})"


def added(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(LEAVES, st.integers(1, 12))
def test_any_holders_add_along_the_same_tree(leaves: int, ranks: int) -> None:
    held: dict[tuple[int, int], str] = {}
    for owned in split_evenly(leaves, ranks):
        fold = TreeAccumulator(leaves, added)
        for leaf in owned:
            fold.put((leaf, leaf + 1), str(leaf))
        assert sorted(fold.nodes) == nodes_of(owned, leaves)
        held |= fold.nodes
    assert total(held, leaves, added) == written((0, leaves))


@given(LEAVES)
def test_leaves_alone_are_added_along_the_same_tree(leaves: int) -> None:
    held = {(leaf, leaf + 1): str(leaf) for leaf in range(leaves)}
    assert total(held, leaves, added) == written((0, leaves))


@given(LEAVES, st.randoms(use_true_random=False))
def test_leaves_may_arrive_in_any_order(leaves: int, random: object) -> None:
    order = list(range(leaves))
    random.shuffle(order)  # type: ignore[attr-defined]
    fold = TreeAccumulator(leaves, added)
    for leaf in order:
        fold.put((leaf, leaf + 1), str(leaf))
    assert fold.nodes == {(0, leaves): written((0, leaves))}


@given(LEAVES)
def test_leaves_in_order_leave_few_partial_sums(leaves: int) -> None:
    fold = TreeAccumulator(leaves, added)
    for leaf in range(leaves):
        fold.put((leaf, leaf + 1), str(leaf))
        assert len(fold.nodes) <= leaves.bit_length()


@given(LEAVES, LEAVES)
def test_a_tree_with_missing_last_leaves_is_the_tree_of_the_others(leaves: int, cut: int) -> None:
    present = min(leaves, cut)

    def add(left: str | None, right: str | None) -> str | None:
        return left if right is None else right if left is None else added(left, right)

    values = {(leaf, leaf + 1): str(leaf) if leaf < present else None for leaf in range(leaves)}
    assert total(values, leaves, add) == written((0, present))


def test_the_whole_tree_must_be_covered() -> None:
    with pytest.raises(ValueError, match="unpack"):
        total({(0, 1): 1, (2, 3): 1}, 3, int.__add__)


@given(st.lists(st.fractions(), min_size=1, max_size=20))
def test_the_total_is_the_sum(values: list[Fraction]) -> None:
    nodes = {(leaf, leaf + 1): value for leaf, value in enumerate(values)}
    assert total(nodes, len(values), Fraction.__add__) == sum(values)
