"""Which rank sends what to which other host: every byte once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.hosts.map import HostMap
from lockstep.comm.hosts.plan import all_gather_rounds, broadcast_slices, chunks_of, cut

placements = st.lists(st.sampled_from("abcd"), min_size=2, max_size=9)
sizes = st.one_of(st.integers(0, 400), st.integers(0, 10_000_000))


@given(sizes, st.integers(1, 9))
def test_slices_cover_all_bytes_in_whole_cache_lines(size, parts):
    bounds = cut(size, parts)
    assert len(bounds) == parts
    assert [begin for begin, _ in bounds] == [0, *[end for _, end in bounds[:-1]]]
    assert bounds[-1][1] == size
    assert all(begin % 64 == 0 for begin, end in bounds if end > begin)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_chunks_cover_all_bytes(size, most):
    chunks = chunks_of(size, most)
    assert b"".join(bytes(end - begin) for begin, end in chunks) == bytes(size)
    assert all(0 < end - begin <= most for begin, end in chunks)


@given(placements, st.data())
def test_a_broadcast_sends_every_byte_to_every_other_host_once(placement, data):
    hosts = HostMap.of(placement)
    root = data.draw(st.integers(0, len(placement) - 1))
    size = data.draw(sizes)
    home = hosts.host_of(root)
    slices = broadcast_slices(hosts, root, size)
    assert all(hosts.host_of(each.source) == home for each in slices)
    for host, ranks in enumerate(hosts.hosts):
        there = [each for each in slices if hosts.host_of(each.target) == host]
        if host == home:
            assert not there
            continue
        assert [each.target for each in there] == list(ranks)
        assert [each.begin for each in there] == [0, *[each.end for each in there[:-1]]]
        assert there[-1].end == size


@given(placements)
def test_an_all_gather_shares_every_block_of_another_host_once(placement):
    hosts = HostMap.of(placement)
    for host, ranks in enumerate(hosts.hosts):
        rounds = all_gather_rounds(hosts, host)
        shared = [rank for blocks in rounds for rank in blocks if rank is not None]
        others = [rank for rank in range(len(placement)) if rank not in ranks]
        assert sorted(shared) == others
        for blocks in rounds:
            assert len(blocks) == len(ranks)
            for position, rank in enumerate(blocks):
                assert rank is None or hosts.partner(rank, host) == ranks[position]
