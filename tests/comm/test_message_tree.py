"""The tree of messages: who sends what to whom, in simulated ranks."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.message_tree import (
    LISTED_REMARKS,
    Packet,
    Send,
    find_children,
    find_parent,
    run_along_tree,
)


def simulate(packets, values=None):
    """Run the exchange of all ranks; return their results, and the messages as (from, to, size)."""
    ranks = len(packets)
    values = [[rank] for rank in range(ranks)] if values is None else values
    running = {
        rank: run_along_tree(
            rank, ranks, packets[rank], values[rank], lambda left, right: left + right,
            lambda value: json.dumps(value).encode(), json.loads,
        )
        for rank in range(ranks)
    }  # fmt: skip
    waiting, mail, sent, found = dict.fromkeys(running), {}, [], {}
    ready = {rank: None for rank in running}
    while ready:
        rank, message = ready.popitem()
        try:
            action = running[rank].send(message)
        except StopIteration as end:
            found[rank] = end.value
            continue
        if isinstance(action, Send):
            assert (rank, action.peer) not in mail
            mail[rank, action.peer] = action.message
            sent.append((rank, action.peer, len(action.message)))
            ready[rank] = None
        else:
            waiting[rank] = action.peer
        for source, target in list(mail):
            if waiting[target] == source:
                waiting[target] = None
                ready[target] = mail.pop((source, target))
    assert not mail
    assert len(found) == ranks, "ranks wait for messages that nobody sends"
    return [found[rank] for rank in range(ranks)], sent


@given(st.integers(1, 5000), st.data())
def test_every_rank_heads_a_contiguous_range(ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))
    begin = rank + 1
    for child in find_children(rank, ranks):
        assert find_parent(child) == rank
        assert child == begin
        begin += child & -child
    assert len(find_children(rank, ranks)) <= math.ceil(math.log2(ranks))


@given(st.integers(1, 70))
def test_values_are_merged_in_rank_order_and_reach_everybody(ranks):
    found, sent = simulate([Packet("in step 3")] * ranks)
    assert {each.body for each in found} == {json.dumps(list(range(ranks))).encode()}
    assert len(sent) == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [4, 64, 1024, 8192])
def test_what_a_rank_exchanges_grows_with_the_logarithm(ranks):
    _, sent = simulate([Packet("in step 3")] * ranks, values=[""] * ranks)
    counts, sizes = [0] * ranks, [0] * ranks
    for source, target, size in sent:
        for rank in (source, target):
            counts[rank] += 1
            sizes[rank] += size
    assert max(counts) == 2 * math.log2(ranks)
    assert max(sizes) <= 100 * max(counts)
    assert sum(counts) / ranks < 4


@given(st.lists(st.sampled_from(["in step 3", "saving", "in step 4"]), min_size=1, max_size=40))
def test_the_first_rank_that_does_something_else_is_named(topics):
    found, _ = simulate([Packet(about) for about in topics])
    expected = next((n for n, each in enumerate(topics) if each != topics[0]), None)
    for each in found:
        assert each.about == topics[0]
        if expected is None:
            assert each.conflict is None
        else:
            assert (each.conflict.rank, each.conflict.about) == (expected, topics[expected])


@given(st.sets(st.integers(0, 39)))
def test_the_first_remarks_are_kept(speakers):
    packets = [
        Packet("in step 3", remarks=((rank, "late"),) if rank in speakers else ())
        for rank in range(40)
    ]
    found, _ = simulate(packets)
    expected = tuple((rank, "late") for rank in sorted(speakers)[:LISTED_REMARKS])
    assert {each.remarks for each in found} == {expected}


def test_a_packet_survives_its_journey():
    packet = Packet("saving é", b"\0{", None, ((3, "late"),))
    assert Packet.unpack(packet.pack()) == packet
