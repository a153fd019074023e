"""The feed: the same memory, another batch each step, and only what is asked for is timed."""

import gc

import pytest
import torch

from benchmarks.feed import Feed

SOURCES = [(torch.full((2, 3), float(turn)), torch.full((2,), turn)) for turn in range(2)]


def test_batches_come_by_turns_into_the_same_memory():
    feed = Feed(SOURCES)
    places = [each.data_ptr() for each in feed.batch]
    seen = []
    times = feed.time_steps(
        lambda batch: seen.append((batch[0][0, 0].item(), batch[1][0].item(), gc.isenabled())),
        calls=2, start_barrier=None, settling=1,
    )  # fmt: skip
    assert seen == [(0.0, 0, False), (1.0, 1, False), (0.0, 0, False)]
    assert len(times) == 2
    assert min(times) > 0
    assert [each.data_ptr() for each in feed.batch] == places
    assert SOURCES[1][0].eq(1).all()


def test_a_step_that_fails_leaves_the_collector_on():
    def fail(batch):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Feed(SOURCES).time_steps(fail, 1, None)
    assert gc.isenabled()
