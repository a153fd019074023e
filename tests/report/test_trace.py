"""Traces: the fields of the Trace Event Format, and arrows within their slices."""

import itertools
import json

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.tools.report.trace import export_trace


def traced(folder, *lines):
    """Return the trace of a run with these lines."""
    return json.loads(export_trace(read_run(records.write(folder, [records.HEADER, *lines]))))[
        "traceEvents"
    ]


@pytest.fixture
def events(tmp_path):
    return traced(tmp_path, *(records.timeline(n, pairs=2) for n in range(3)))


def enclosing(events, end):
    """Return the slices of a thread that enclose one end of an arrow."""
    return [
        one["name"]
        for one in events
        if one["ph"] == "X"
        and one["tid"] == end["tid"]
        and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
    ]


def test_events_have_the_fields_of_their_phase(events):
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    assert {event["ph"] for event in events} == needed.keys()
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert all(event[name] >= 0 for name in ("ts", "dur") if name in event)


def test_threads_are_named_for_their_ranks(events):
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {rank: f"rank {rank}" for rank in range(4)}


def test_times_are_microseconds_on_one_clock(events):
    (work,) = (
        e for e in events if e["name"] == "backward of micro-batch 3 on stage 1" and e["ts"] > 4e4
    )
    assert work["ts"] == pytest.approx(2 * 20_000 + 300 + 9_500, abs=0.01)  # step 2, rank 3
    assert work["dur"] == pytest.approx(3000, abs=0.01)
    assert work["args"] == {"micro-batch": 3, "stage": 1}


def test_slices_of_a_thread_nest(events):
    for rank in range(4):
        own = [e for e in events if e["ph"] == "X" and e["tid"] == rank]
        steps = [e for e in own if e["cat"] == "step"]
        inner = sorted((e for e in own if e["cat"] != "step"), key=lambda e: e["ts"])
        assert len(steps) == 3
        for before, after in itertools.pairwise(inner):
            assert before["ts"] + before["dur"] <= after["ts"] + 2e-3
        for one in inner:
            assert any(
                s["ts"] <= one["ts"] + 2e-3 and one["ts"] + one["dur"] <= s["ts"] + s["dur"] + 2e-3
                for s in steps
            )


def test_waiting_names_the_source(events):
    waiting = [e for e in events if e["name"] == "waiting for rank 1"]
    assert [round(e["dur"]) for e in waiting] == [4000, 1000] * 3
    assert {e["tid"] for e in waiting} == {0}


def test_arrows_lead_from_producer_to_consumer(events):
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 3 * 2 * 4  # steps, replicas, two outputs and two gradients
    for number, begin in begins.items():
        source, target = (enclosing(events, end)[-1] for end in (begin, ends[number]))
        assert source.split(" on ")[0] == target.split(" on ")[0]  # the same micro-batch, same way
        assert {source[-1], target[-1]} == {"0", "1"}
        assert begin["tid"] // 2 == ends[number]["tid"] // 2  # within its replica


def test_a_run_on_many_ranks_has_those_that_the_record_lists(tmp_path):
    events = traced(tmp_path, *records.summarized(3)[1:])
    names = [one["args"]["name"] for one in events if one["name"] == "thread_name"]
    assert names == ["rank 5", "rank 6", "rank 7", "rank 700"]
    steps = [one for one in events if one["ph"] == "X" and one["name"].startswith("step")]
    assert len(steps) == 6
    assert {one["tid"] for one in steps} == {5, 6, 7, 700}


def test_processes_of_a_resumed_run_follow_each_other(tmp_path):
    """Each has a clock of its own: the second one's begins earlier here."""
    late = records.timeline(2)
    for rank in late["ranks"]:
        rank["begin"] -= 400
    lines = [*map(records.step, range(2)), *map(records.timeline, range(2)), records.resume(2)]
    slices = [event for event in traced(tmp_path, *lines, late) if event["ph"] == "X"]
    steps = {name: [event for event in slices if event["name"] == name]
             for name in ("step 0", "step 1", "step 2")}  # fmt: skip
    end = max(event["ts"] + event["dur"] for event in steps["step 1"])
    assert min(event["ts"] for event in steps["step 2"]) == pytest.approx(end, abs=1)
    assert min(event["ts"] for event in steps["step 0"]) == 0
