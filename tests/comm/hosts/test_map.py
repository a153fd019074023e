"""The hosts of a group's ranks, and the nodes that they add alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.hosts.map import HostMap, find_host_nodes
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import nodes_of, total

placements = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(placements)
def test_every_rank_is_on_its_host_once(placement):
    hosts = HostMap.of(placement)
    assert hosts.size == len(placement)
    assert sorted(rank for ranks in hosts.hosts for rank in ranks) == list(range(len(placement)))
    for rank, identity in enumerate(placement):
        ranks = hosts.hosts[hosts.host_of(rank)]
        assert {placement[each] for each in ranks} == {identity}
        assert ranks[hosts.local_rank(rank)] == rank
    assert [ranks[0] for ranks in hosts.hosts] == sorted(ranks[0] for ranks in hosts.hosts)


@given(placements, st.integers(1, 20))
def test_the_nodes_of_hosts_are_added_along_the_tree(placement, leaves):
    hosts = HostMap.of(placement).hosts
    owned = split_evenly(leaves, len(placement))
    nodes_by_rank = [nodes_of(each, leaves) for each in owned]
    nodes = find_host_nodes(hosts, nodes_by_rank, leaves)
    for ranks, of_host in zip(hosts, nodes, strict=True):
        covered = [leaf for lo, hi in of_host for leaf in range(lo, hi)]
        assert covered == sorted(leaf for rank in ranks for leaf in owned[rank])
    spans = {node: node for of_host in nodes for node in of_host}
    assert total(spans, leaves, lambda left, right: (left[0], right[1])) == (0, leaves)


def test_alternating_ranks_leave_a_node_per_leaf():
    leaves = [[(rank, rank + 1)] for rank in range(4)]
    assert find_host_nodes(((0, 1), (2, 3)), leaves, 4) == [[(0, 2)], [(2, 4)]]
    assert find_host_nodes(((0, 2), (1, 3)), leaves, 4) == [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
