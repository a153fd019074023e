"""The clock: the offset is right to within a round trip, and 0 on one host."""

import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.clock_offset import RoundTrip, clock_offset, estimate

delay = st.floats(0, 1e-2)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(delay, delay), min_size=1, max_size=8))
def test_the_estimate_is_off_by_at_most_the_shortest_round_trip(offset, ways):
    """Ways there and back may differ as they like."""
    rounds = [
        RoundTrip(10.0 * turn, 10.0 * turn + there + offset, 10.0 * turn + there + back)
        for turn, (there, back) in enumerate(ways)
    ]
    shortest = min(there + back for there, back in ways)
    assert abs(estimate(rounds) - offset) <= shortest + 1e-9


def test_the_round_with_the_shortest_way_counts():
    assert estimate([RoundTrip(0, 900, 800), RoundTrip(1000, 1505, 1002)]) == 504
    assert estimate([RoundTrip(0, 505, 2), RoundTrip(1000, 1700, 1400)]) == 504


def test_clocks_that_may_be_the_same_are_the_same():
    assert estimate([RoundTrip(10, 10.9, 11)]) == 0
    assert estimate([RoundTrip(10, 11.1, 11)]) == pytest.approx(0.6)


def offsets():
    """Return a rank's offset by its own clock, by one that is ahead, and within a group."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    ahead = clock_offset(clock=lambda: time.perf_counter() + 100 * rank)
    within = clock_offset(pair, lambda: time.perf_counter() + 100 * rank) if rank else None
    return clock_offset(), ahead, within


@pytest.mark.parametrize("backend", ["gloo", "lockstep"])
def test_ranks_of_one_host_share_a_clock_and_see_one_that_does_not(ranks, backend):
    found = ranks(offsets, 3, backend=backend)
    assert [own for own, _, _ in found] == [0.0, 0.0, 0.0]
    assert [ahead for _, ahead, _ in found] == pytest.approx([0, -100, -200], abs=1)
    assert [within for _, _, within in found[1:]] == pytest.approx([0, -100], abs=1)
