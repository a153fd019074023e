"""Timelines out of records: pieces of work, sums of steps, and what is neither."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.record.reader import read
from lockstep.record.recorded import of_line, of_steps, timelines, typical


def test_the_ranks_are_laid_on_one_clock():
    found = of_line(records.timeline(3))
    begins = {(w.rank, w.kind, w.microbatch): w.begin for w in found.works}
    assert found.origin == pytest.approx(500.06)
    assert begins[0, "forward", 0] == 0
    assert begins[1, "forward", 0] == pytest.approx(2.6e-3)  # begun 0.1 ms after rank 0
    assert (found.title, found.ranks, found.stages) == ("step 3", 2, 2)


def test_what_a_rank_waited_for_is_kept():
    (work,) = (w for w in of_line(records.timeline(0)).works if w.source == 1 and w.microbatch == 1)
    assert (work.waited, work.octets) == (pytest.approx(1e-3), 1000)


def test_short_rows_and_unknown_kinds_are_taken():
    line = {"ranks": [{"begin": 5, "works": [["dream", None, None, 0, 1]]}], "step": 1}
    (work,) = of_line(line).works
    assert (work.kind, work.begin, work.end, work.stage) == ("dream", 0, 1, None)


ANYTHING = st.sampled_from([None, True, -1, 0, 1, 2.5, float("nan"), 1e308, "x", [], [[0]], {}])
PIECE = st.lists(ANYTHING, min_size=4, max_size=9)
RANK = st.fixed_dictionaries({}, optional={"begin": ANYTHING, "works": st.lists(PIECE) | ANYTHING})


@given(st.lists(RANK | ANYTHING) | ANYTHING)
def test_no_line_whatever_it_holds_stops_a_reader(ranks):
    found = of_line({"kind": "timeline", "ranks": ranks})
    if found is not None:
        assert found.length >= 0
        assert all(work.begin >= 0 for work in found.works)


def test_steps_of_replicas_are_drawn_from_their_sums(tmp_path):
    run = read(records.write(tmp_path, records.whole()))
    found = of_steps(run, 12, 15)
    assert found.title == "steps 12 to 14"
    assert found.length == pytest.approx(run.steps.ranks[12:15].sum(axis=2).max(axis=1).sum())
    kinds = [work.kind for work in found.works if work.rank == 1][:4]
    assert kinds == ["data", "compute", "waiting", "communication"]
    slow = [w for w in found.works if w.kind == "waiting" and w.end - w.begin > 0.09]
    assert [(work.rank, work.source) for work in slow] == [(0, 1)]


def test_the_typical_step_is_that_of_median_length_without_the_first(tmp_path):
    lines = [records.timeline(n) for n in range(4)]
    lines[0]["ranks"][0]["works"][-1][4] = 5.0
    lines[1]["ranks"][0]["works"][-1][4] = 2.0
    lines[2]["ranks"][0]["works"][-1][4] = 1.0
    run = read(records.write(tmp_path, [records.HEADER, *lines]))
    assert len(timelines(run)) == 4
    assert typical(run).title == "step 2"


def test_a_rank_alone_has_nothing_typical(tmp_path):
    alone = [records.step(number, ranks=[[0.006, 0, 0, 0]]) for number in range(3)]
    assert typical(read(records.write(tmp_path, [records.HEADER, *alone]))) is None


def test_steps_without_times_are_drawn_as_none(tmp_path):
    line = records.step(0, ranks=[[None] * 4, [None] * 4])
    run = read(records.write(tmp_path, [records.HEADER, line]))
    assert np.isnan(run.steps.ranks).all()
    assert typical(run).works == ()
    assert json.dumps(typical(run).origin) == "0.0"
