"""The times of many ranks as a summary."""

import json
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.record.rank_summary import (
    DETAILED_RANKS,
    LISTED_RANKS,
    Durations,
    RankTimes,
    RankUsage,
)

SECONDS = st.integers(0, 2 * 10**6).map(lambda value: value / 1e6)
ROWS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.integers(0, 10**10)), min_size=1)
MANY = DETAILED_RANKS + 1


def usages(rows, ranks):
    return [RankUsage.of(RankTimes(rank, *row), ranks) for rank, row in enumerate(rows)]


def test_times_split_a_step_by_rank():
    rows = [(2.0, 1.0, 0.0, 7), (5.0, 0.0, 0.0, 8)]
    found = reduce(RankUsage.merge, usages(rows, 2))
    by_first = found.compute_rows(Durations(arrived=3.0, exchanged=2.5, reduced=1.0, updated=0.5))
    by_second = found.compute_rows(Durations(arrived=5.0, exchanged=0.5, reduced=1.0, updated=0.5))
    assert by_first == by_second
    assert by_first == [pytest.approx([2.5, 1.5, 2.0, 1.0]), pytest.approx([5.5, 1.5, 0.0, 0.0])]
    assert found.list_memory() == [7, 8]
    assert found.summarize_times(Durations(3.0, 2.5, 1.0, 0.5)) is None
    assert found.summarize_memory() is None
    (alone,) = usages(rows[:1], 1)
    assert alone.compute_rows(Durations(3.0, 0.1, 0.1, 0.5)) == [
        pytest.approx([2.5, 0.0, 0.0, 1.0])
    ]


@given(ROWS, st.integers(0, 100), st.integers(0, 100))
def test_merging_does_not_depend_on_the_grouping(rows, one, two):
    for ranks in (len(rows), MANY):
        parts = usages(rows, ranks)
        whole = reduce(RankUsage.merge, parts)
        lo, hi = sorted((one % (len(rows) + 1), two % (len(rows) + 1)))
        ranges = [parts[:lo], parts[lo:hi], parts[hi:]]
        groups = [reduce(RankUsage.merge, part) for part in ranges if part]
        assert reduce(lambda right, left: left.merge(right), reversed(groups)) == whole
        assert RankUsage.unpack(json.loads(json.dumps(whole))) == whole


@given(ROWS)
def test_a_summary_has_the_statistics_of_the_rows(rows):
    """The rows that few ranks would have are the reference."""
    durations = Durations(sum(rows[0][:3]), 0.75, 0.5, 0.25)
    count = len(rows)
    expected = np.array(reduce(RankUsage.merge, usages(rows, 64)).compute_rows(durations))
    merged = reduce(RankUsage.merge, usages(rows, MANY))
    found = merged.summarize_times(durations)
    assert found["ranks"] == count
    assert found["min"] == pytest.approx(expected.min(axis=0), abs=2e-6)
    assert found["max"] == pytest.approx(expected.max(axis=0), abs=2e-6)
    assert found["mean"] == pytest.approx(expected.mean(axis=0), abs=2e-6)
    busy = [compute + data for compute, data, _, _ in rows]
    slowest = sorted(range(count), key=lambda rank: (-busy[rank], rank))[:LISTED_RANKS]
    assert [row[0] for row in found["slowest"]] == slowest
    memory = [row[3] for row in rows]
    largest = sorted(range(count), key=lambda rank: (-memory[rank], rank))[:LISTED_RANKS]
    described = merged.summarize_memory()
    assert described["largest"] == [[rank, memory[rank]] for rank in largest]
    assert (described["min"], described["max"]) == (min(memory), max(memory))
    assert merged.compute_rows(durations) == merged.list_memory() == []


def test_the_median_is_that_of_the_ranks():
    rows = [(0.1 + rank * 1e-5, 0.01, 0.0, 1000 + rank) for rank in range(1001)]
    found = reduce(RankUsage.merge, usages(rows, 1001)).summarize_times(
        Durations(0.11, 0.02, 0.0, 0.0)
    )
    assert found["median"] == pytest.approx([0.105, 0.01, 0.005, 0.01], rel=0.04, abs=0.004)
    assert found["mean"] == pytest.approx([0.105, 0.01, 0.005, 0.01], rel=1e-6)
