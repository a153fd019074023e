"""Timelines as JSON in the Trace Event Format, for Perfetto and chrome://tracing.

    process   the run                 thread   a rank
    slice     (ph X) a step; within it the spans of work, and the waiting between them
    arrow     (ph s, f) from the span that computed an output or gradient to the span on
              another rank that used it

Times are microseconds from the first span.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lockstep.record.columns import as_float
from lockstep.record.reader import Run
from lockstep.record.timeline import Timeline, TimelineSpan, parse_timeline, sum_steps

__all__ = ["export_trace", "find_transfers"]

PROCESS_ID = 1
MAX_SUMMED_STEPS = 2000
COLORS = {
    "forward": "thread_state_running",
    "backward": "rail_response",
    "input": "rail_response",
    "weight": "rail_animation",
    "waiting": "grey",
}  # color names of chrome://tracing; Perfetto chooses its own


def export_trace(run: Run) -> bytes:
    """Return the trace of all recorded timelines of a run as JSON.

    If there are none, the trace has the times per category of the last 2,000 steps: of all ranks,
    or of the ranks that the record lists.
    """
    recorded = list(_recorded_steps(run)) or list(_summed_steps(run))
    trace = {
        "traceEvents": [*_metadata(run.name, recorded), *_events(recorded)],
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "made by": "lockstep"},
    }
    return json.dumps(trace, separators=(",", ":")).encode()


def _recorded_steps(run: Run) -> Iterator[Timeline]:
    """Yield the recorded timelines.

    Each process of a resumed run has a separate clock, so the first timeline of a process is moved
    to the end of the last one of the previous process.
    """
    shift, end, segment = 0.0, 0.0, -1
    for line in run.timelines:
        if (step := parse_timeline(line)) is None:
            continue
        previous, segment = segment, run.segment(as_float(line.get("step")))
        if previous not in (-1, segment):
            shift = end - step.origin
        step = replace(step, origin=step.origin + shift)
        end = step.origin + step.duration
        yield step


def _summed_steps(run: Run) -> Iterator[Timeline]:
    """Yield the timelines of the last steps, each after the previous one."""
    count, end = len(run.steps), 0.0
    has_times = run.steps.ranks.size or run.steps.slowest.size
    for at in range(max(0, count - MAX_SUMMED_STEPS), count if has_times else 0):
        step = sum_steps(run.steps, at, at + 1)
        step = replace(step, origin=max(end, step.origin))
        end = step.origin + step.duration
        yield step


def _metadata(name: str, recorded: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Return the events that name the process and its threads."""
    ranks = sorted({span.rank for one in recorded for span in one.spans})
    given: list[tuple[str, int, dict[str, Any]]] = []
    given.append(("process_name", 0, {"name": f"lockstep: {name}"}))
    for rank in ranks:
        given.append(("thread_name", rank, {"name": f"rank {rank}"}))
        given.append(("thread_sort_index", rank, {"sort_index": rank}))
    return [
        {"ph": "M", "name": what, "pid": PROCESS_ID, "tid": thread, "args": arguments}
        for what, thread, arguments in given
    ]


def _events(recorded: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Yield the slices and arrows of all timelines, on one clock."""
    start = min((one.origin for one in recorded), default=0.0)
    arrow = 0
    for one in recorded:
        at = one.origin - start
        own: dict[int, list[TimelineSpan]] = {}
        for span in one.spans:
            own.setdefault(span.rank, []).append(span)
        for rank in sorted(own):
            yield from _slices(one.title, rank, own[rank], at)
        for source, target in find_transfers(one):
            arrow += 1
            yield from _arrows(source.shift(at), target.shift(at), arrow)


def _slices(
    title: str, rank: int, spans: Sequence[TimelineSpan], at: float
) -> Iterator[dict[str, Any]]:
    """Yield the step of one rank, and within it the work and the waiting."""
    if not spans:
        return
    begin = min(span.begin - span.waited for span in spans)
    end = max(span.end for span in spans)
    yield _slice(title, "step", rank, at + begin, at + end, {})
    previous_end = begin
    for span in sorted(spans, key=lambda span: span.begin):
        waiting = min(span.waited, span.begin - previous_end)
        if waiting > 0:
            whom = "" if span.source is None else f" for rank {span.source}"
            times = (at + span.begin - waiting, at + span.begin)
            yield _slice(f"waiting{whom}", "waiting", rank, *times, {})
        previous_end = max(previous_end, span.end)
        yield _slice(
            span.description, span.kind, rank, at + span.begin, at + span.end, _arguments(span)
        )


def _slice(
    name: str, kind: str, rank: int, begin: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Return one slice; `begin` and `end` are in seconds."""
    ts = _microseconds(begin)
    event = {
        "ph": "X", "name": name, "cat": kind, "pid": PROCESS_ID, "tid": rank, "ts": ts,
        "dur": round(max(0.0, _microseconds(end) - ts), 3), "args": arguments,
    }  # fmt: skip
    return event | ({"cname": COLORS[kind]} if kind in COLORS else {})


def _arguments(span: TimelineSpan) -> dict[str, Any]:
    """Return the arguments of a span's slice, which viewers list."""
    given = {
        "micro-batch": span.microbatch,
        "stage": span.stage,
        "from rank": span.source,
        "bytes": span.num_bytes or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def find_transfers(timeline: Timeline) -> Iterator[tuple[TimelineSpan, TimelineSpan]]:
    """Yield pairs of spans: one that computed an output or gradient, one that used it.

    Outputs go to the next stage and gradients to the previous one; only pairs on different
    ranks are transfers.
    """
    computed: dict[tuple[str, int, int], TimelineSpan] = {}
    used: list[tuple[tuple[str, int, int], TimelineSpan]] = []
    for span in timeline.spans:
        if span.stage is None or span.microbatch is None:
            continue
        if span.kind == "forward":
            computed["output", span.stage, span.microbatch] = span
            used.append((("output", span.stage - 1, span.microbatch), span))
        elif span.kind in ("backward", "input"):
            computed["gradient", span.stage, span.microbatch] = span
            used.append((("gradient", span.stage + 1, span.microbatch), span))
    for key, span in used:
        if key in computed and computed[key].rank != span.rank:
            yield computed[key], span


def _arrows(source: TimelineSpan, target: TimelineSpan, number: int) -> list[dict[str, Any]]:
    """Return the two ends of an arrow, each within its slice."""
    given = {"name": "transfer", "cat": "transfer", "id": number, "pid": PROCESS_ID}
    # The beginning of an arrow belongs to the slice that encloses it.
    leaves = _microseconds((source.begin + source.end) / 2)
    return [
        {"ph": "s", **given, "tid": source.rank, "ts": leaves},
        {"ph": "f", "bp": "e", **given, "tid": target.rank, "ts": _microseconds(target.begin)},
    ]


def _microseconds(seconds: float) -> float:
    """Return seconds in the unit of the trace."""
    return round(1e6 * seconds, 3)
