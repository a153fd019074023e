"""Timelines: their figures, and reading them from a record."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.record.reader import read_run
from lockstep.record.timeline import (
    Timeline,
    TimelineSpan,
    parse_timeline,
    read_timelines,
    sum_steps,
    typical_timeline,
)


def by_hand(*rows, ranks=2):
    """Return a timeline of (rank, kind, begin, end, stage, micro-batch)."""
    return Timeline("by hand", ranks, tuple(TimelineSpan(*row) for row in rows))


TWO = by_hand(
    (0, "forward", 0, 1, 0, 0),
    (1, "forward", 1, 2, 1, 0),
    (1, "backward", 2, 4, 1, 0),
    (0, "backward", 4, 5, 0, 0),
)


def test_duration_bubble_fraction_and_load_balance():
    assert TWO.duration == 5
    assert TWO.busy_times == [2, 3]
    assert TWO.bubble_fraction == pytest.approx(1 - 5 / 10)
    assert TWO.load_balance == pytest.approx(2.5 / 3)


def test_waiting_is_not_busy_time():
    waits = by_hand((0, "compute", 0, 2), (1, "compute", 0, 1), (1, "waiting", 1, 2))
    assert waits.busy_times == [2, 1]
    assert waits.bubble_fraction == pytest.approx(0.25)


def test_ranks_are_on_one_clock():
    found = parse_timeline(records.timeline(3))
    begins = {(w.rank, w.kind, w.microbatch): w.begin for w in found.spans}
    assert found.origin == pytest.approx(500.06)
    assert begins[0, "forward", 0] == 0
    assert begins[1, "forward", 0] == pytest.approx(2.6e-3)  # begun 0.1 ms after rank 0
    assert (found.title, found.num_ranks, found.num_stages) == ("step 3", 2, 2)


def test_waiting_has_its_source_and_bytes():
    (work,) = (
        w for w in parse_timeline(records.timeline(0)).spans if w.source == 1 and w.microbatch == 1
    )
    assert (work.waited, work.num_bytes) == (pytest.approx(1e-3), 1000)


def test_short_entries_and_unknown_kinds_are_accepted():
    line = {"ranks": [{"begin": 5, "works": [["dream", None, None, 0, 1]]}], "step": 1}
    (work,) = parse_timeline(line).spans
    assert (work.kind, work.begin, work.end, work.stage) == ("dream", 0, 1, None)


ANYTHING = st.sampled_from([None, True, -1, 0, 1, 2.5, float("nan"), 1e308, "x", [], [[0]], {}])
PIECE = st.lists(ANYTHING, min_size=4, max_size=9)
RANK = st.fixed_dictionaries({}, optional={"begin": ANYTHING, "works": st.lists(PIECE) | ANYTHING})


@given(st.lists(RANK | ANYTHING) | ANYTHING)
def test_malformed_lines_do_not_raise(ranks):
    found = parse_timeline({"kind": "timeline", "ranks": ranks})
    if found is not None:
        assert found.duration >= 0
        assert all(work.begin >= 0 for work in found.spans)


def test_steps_without_spans_are_drawn_from_their_sums(tmp_path):
    run = read_run(records.write(tmp_path, records.whole()))
    found = sum_steps(run.steps, 12, 15)
    assert found.title == "steps 12 to 14"
    assert found.duration == pytest.approx(run.steps.ranks[12:15].sum(axis=2).max(axis=1).sum())
    kinds = [work.kind for work in found.spans if work.rank == 1][:4]
    assert kinds == ["data", "compute", "waiting", "communication"]
    slow = [w for w in found.spans if w.kind == "waiting" and w.end - w.begin > 0.09]
    assert [(work.rank, work.source) for work in slow] == [(0, 1)]


def test_the_typical_timeline_has_median_duration_without_the_first(tmp_path):
    lines = [records.timeline(n) for n in range(4)]
    lines[0]["ranks"][0]["works"][-1][4] = 5.0
    lines[1]["ranks"][0]["works"][-1][4] = 2.0
    lines[2]["ranks"][0]["works"][-1][4] = 1.0
    run = read_run(records.write(tmp_path, [records.HEADER, *lines]))
    assert len(read_timelines(run.timelines)) == 4
    assert typical_timeline(run).title == "step 2"


def test_steps_without_times_have_no_spans(tmp_path):
    line = records.step(0, ranks=[[None] * 4, [None] * 4])
    run = read_run(records.write(tmp_path, [records.HEADER, line]))
    assert np.isnan(run.steps.ranks).all()
    assert typical_timeline(run).spans == ()
    assert json.dumps(typical_timeline(run).origin) == "0.0"
