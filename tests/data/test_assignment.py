"""The assignment of micro-batches to replicas and hosts."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.assignment import ReplicaShare, assign_microbatches, on_one_host
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import nodes_of


@st.composite
def placements(draw: Any, replicas: int) -> tuple[tuple[int, ...], ...]:
    """Draw the replicas of each host."""
    hosts: dict[int, list[int]] = {}
    for replica in range(replicas):
        hosts.setdefault(draw(st.integers(0, 3)), []).append(replica)
    return tuple(tuple(each) for each in hosts.values())


def shares(m: int, hosts: tuple[tuple[int, ...], ...]) -> list[ReplicaShare]:
    return [ReplicaShare(m, hosts, replica) for replica in range(sum(map(len, hosts)))]


@given(st.integers(1, 12), st.integers(1, 40), st.data())
def test_every_microbatch_is_assigned_once(replicas: int, leaves: int, data: st.DataObject) -> None:
    hosts = data.draw(placements(replicas))
    assigned = assign_microbatches(leaves, hosts)
    by_host = [index for ranks in hosts for replica in ranks for index in assigned[replica]]
    assert by_host == list(range(leaves))
    sizes = [len(each) for each in assigned]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 12), st.integers(1, 40))
def test_on_one_host_the_ranges_are_even(replicas: int, leaves: int) -> None:
    assert assign_microbatches(leaves, on_one_host(replicas)) == tuple(
        split_evenly(leaves, replicas)
    )


def spreads(larger: int, widths: list[int]) -> Iterator[list[int]]:
    """Yield every way to give `larger` further micro-batches to hosts, one per replica at most."""
    if not widths:
        yield from [[]] if larger == 0 else []
        return
    for extra in range(min(widths[0], larger) + 1):
        for rest in spreads(larger - extra, widths[1:]):
            yield [extra, *rest]


@given(st.integers(1, 6), st.integers(1, 20), st.data())
def test_hosts_have_as_few_nodes_as_an_even_assignment_allows(
    replicas: int, leaves: int, data: st.DataObject
) -> None:
    hosts = data.draw(placements(replicas))
    small, larger = divmod(leaves, replicas)

    def count_nodes(sizes: list[int]) -> int:
        stops = list(accumulate(sizes))
        spans = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        return sum(len(nodes_of(span, leaves)) for span in spans)

    assigned = assign_microbatches(leaves, hosts)
    found = count_nodes([sum(len(assigned[each]) for each in ranks) for ranks in hosts])
    assert found == min(
        count_nodes([len(ranks) * small + extra for ranks, extra in zip(hosts, each, strict=True)])
        for each in spreads(larger, [len(ranks) for ranks in hosts])
    )


@pytest.mark.parametrize(
    ("leaves", "hosts", "expected"),
    [
        (8, ((0, 1), (2, 3)), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, ((0, 2), (1, 3)), [(0, 1), (4, 5), (2, 3), (6, 7)]),
        (8, ((0, 1, 2), (3,)), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, ((0, 1, 2), (3, 4, 5)), [(0, 1), (2,), (3,), (4, 5), (6,), (7,)]),
        (3, ((0, 2), (1, 3)), [(0,), (2,), (1,), ()]),
    ],
)
def test_hosts_own_whole_subtrees(
    leaves: int, hosts: tuple[tuple[int, ...], ...], expected: list[tuple[int, ...]]
) -> None:
    assert [tuple(each) for each in assign_microbatches(leaves, hosts)] == expected


def test_many_hosts_are_assigned_in_linear_time() -> None:
    hosts = tuple(tuple(range(8 * each, 8 * each + 8)) for each in range(128))
    assert sum(map(len, assign_microbatches(2_000, hosts))) == 2_000


@given(st.integers(0, 200), st.integers(1, 16), st.data())
def test_pieces_are_never_empty_and_do_not_depend_on_the_replicas(
    n: int, m: int, data: st.DataObject
) -> None:
    hosts = data.draw(placements(data.draw(st.integers(1, m))))
    held = [piece for share in shares(m, hosts) for piece in share.pieces(n)]
    assert sorted(held) == list(ReplicaShare(m, on_one_host(1), 0).pieces(n))
    assert all(len(span) > 0 for _, span in held)
