"""The hosts of a group's ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.hosts.map import HostMap

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


@given(placements)
def test_partners_are_spread_over_the_ranks_of_a_host(placement):
    hosts = HostMap.of(placement)
    for host, ranks in enumerate(hosts.hosts):
        for other, others in enumerate(hosts.hosts):
            found = [hosts.partner(rank, host) for rank in others]
            assert set(found) <= set(ranks)
            if other == host:
                assert tuple(found) == ranks
            counts = [found.count(rank) for rank in ranks]
            assert max(counts) - min(counts) <= 1
