"""The replay: what was recorded, simulated with its own times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.pipeline.replay import measured, replay
from lockstep.pipeline.schedules import NAMES, schedule
from lockstep.pipeline.simulation import Costs, simulate
from lockstep.record.timeline import Span, Timeline, parse_timeline


def test_it_is_the_recording_without_transfers():
    found = replay(parse_timeline(records.timeline(0, pairs=2)))
    assert (found.title, found.num_ranks) == ("step 0, simulated", 4)
    ends = [(w.rank, w.kind, w.microbatch, w.begin) for w in found.spans if w.rank == 2]
    assert ends == [
        (2, "forward", 2, 0),
        (2, "forward", 3, pytest.approx(2e-3)),
        (2, "backward", 2, pytest.approx(7e-3)),
        (2, "backward", 3, pytest.approx(12e-3)),
    ]


def test_times_are_medians():
    works = [Span(0, "forward", 0, end, 0, j) for j, end in enumerate((1, 2, 9))]
    parts = [Span(0, "input", 0, 3, 0, 0), Span(0, "weight", 3, 7, 0, 0)]
    found = measured(Timeline("", 1, (*works, *parts)))
    assert found == Costs((2,), (3,), (4,), backward=(7,))


def test_half_of_a_whole_backward_is_for_the_weights():
    works = (Span(0, "forward", 0, 1, 0, 0), Span(0, "backward", 1, 4, 0, 0))
    assert measured(Timeline("", 1, works)) == Costs((1,), (1.5,), (1.5,), backward=(3,))


@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(1, 9))
def test_a_simulation_is_its_own_replay(name, ranks, microbatches):
    actions = schedule(name, ranks, microbatches)
    spans = simulate(actions).spans
    works = tuple(
        Span(s.rank, s.action.kind, s.begin, s.end, s.action.stage, s.action.microbatch)
        for s in spans
    )
    assert replay(Timeline("", ranks, works)).spans == works


@pytest.mark.parametrize("missing", ["forward", "backward"])
def test_a_recording_that_lacks_work_has_none(missing):
    whole = parse_timeline(records.timeline(0))
    works = tuple(w for w in whole.spans if (w.kind, w.rank) != (missing, 1))
    assert replay(Timeline("", 2, works)) is None


def test_replicas_alone_have_none():
    assert replay(Timeline("", 2, (Span(0, "compute", 0, 1), Span(1, "compute", 0, 1)))) is None
