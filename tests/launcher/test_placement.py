"""Local ranks and indices of hosts follow from who shares a host."""

from hypothesis import given
from hypothesis import strategies as st

import hosts
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.placement import get_host_identity, number_hosts, place_rank

UNKNOWN = ("local_rank", "local_world_size", "host")


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_local_ranks_count_the_ranks_of_a_host_in_order(identities):
    numbers = number_hosts(identities)
    assert [numbers.index(host) for host in range(max(numbers) + 1)] == sorted(
        identities.index(identity) for identity in set(identities)
    )
    size = len(identities)
    placed = [place_rank(RankInfo(rank, size, unknown=UNKNOWN), numbers) for rank in range(size)]
    assert {(info.host, info.local_rank) for info in placed} == {
        (host, local_rank) for host in set(numbers) for local_rank in range(numbers.count(host))
    }
    assert all(info.local_world_size == numbers.count(info.host) for info in placed)
    for one in placed:
        for other in placed:
            is_same = identities[one.rank] == identities[other.rank]
            assert is_same == (one.host == other.host)
            assert not (is_same and one.rank < other.rank) or one.local_rank < other.local_rank


def test_what_the_environment_gives_is_kept():
    given_local = RankInfo(2, 4, 1, 2, 0, "a", 1, "mpiexec", unknown=("host",))
    assert place_rank(given_local, [0, 1, 1, 0]) == RankInfo(2, 4, 1, 2, 1, "a", 1, "mpiexec")


def test_processes_of_a_host_have_one_identity_and_other_hosts_another():
    here = get_host_identity()
    assert here == get_host_identity()
    with hosts.network("a", "b") as net:
        a, b = (host.namespaces.call(get_host_identity) for host in (net["a"], net["b"]))
    assert len({here, a, b}) == 3
