"""Where the ranks of an elastic run are, for random hosts and members."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.host_plan import (
    choose_host,
    find_coordinates,
    order_by_host,
    share_ranks,
)


@given(wanted=st.integers(1, 64), hosts=st.integers(1, 8))
def test_hosts_share_the_ranks_evenly(wanted, hosts):
    shares = share_ranks(wanted, hosts)
    assert sum(shares) == wanted
    assert len(shares) == hosts
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(hosts=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_places_count_the_ranks_of_each_host(hosts):
    coordinates = find_coordinates(hosts)
    assert [coordinates.rank for coordinates in coordinates] == list(range(len(hosts)))
    assert [coordinates.host for coordinates in coordinates] == hosts
    for host, size in Counter(hosts).items():
        own = [coordinates for coordinates in coordinates if coordinates.host == host]
        assert [coordinates.local_rank for coordinates in own] == list(range(size))
        assert {coordinates.local_world_size for coordinates in own} == {size}


@given(
    hosts=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    first=st.integers(1, 10),
)
def test_members_of_a_host_have_contiguous_ranks_after_the_first_member(hosts, first):
    members = list(range(len(hosts)))
    staying = members[:first]
    joined = members[first:]
    ordered = order_by_host(staying, joined, hosts.__getitem__)
    assert sorted(ordered) == members
    assert ordered[0] == staying[0]
    changes = sum(hosts[a] != hosts[b] for a, b in pairwise(ordered))
    assert changes == len(set(hosts)) - 1
    for host in set(hosts):  # newcomers come after the others of their host
        own = [member for member in ordered if hosts[member] == host]
        assert own == sorted(own)


def test_members_of_one_host_keep_their_order():
    assert order_by_host([3, 1, 2], [5, 4], lambda member: 0) == (3, 1, 2, 5, 4)


@given(
    wanted=st.integers(1, 16),
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_new_process_is_started_where_most_are_missing(wanted, counts, data):
    shares = share_ranks(wanted, len(counts))
    present = data.draw(st.sets(st.sampled_from(range(len(counts)))))
    host = choose_host(shares, present, dict(enumerate(counts)))
    missing = {each: shares[each] - counts[each] for each in present}
    if host is None:
        assert all(each <= 0 for each in missing.values())
    else:
        assert missing[host] == max(missing.values()) > 0
