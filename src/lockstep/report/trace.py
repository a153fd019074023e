"""The trace: timelines as the JSON that Perfetto and chrome://tracing open.

    process   the run                 thread   a rank
    slice     (ph X) a step; in it its pieces of work, and the waiting between them
    arrow     (ph s, f) from the piece that made an output or gradient to the one that
              took it on another rank

Times are microseconds from the first piece of work. The format is described in
Google's document "Trace Event Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lockstep.record.reader import Run
from lockstep.record.recorded import of_steps, timelines
from lockstep.record.timeline import Timeline, Work

__all__ = ["events", "trace"]

PROCESS = 1
STEPS = 2000  # steps at most that are written from their sums
COLOURS = {
    "forward": "thread_state_running",
    "backward": "rail_response",
    "input": "rail_response",
    "weight": "rail_animation",
    "waiting": "grey",
}  # names that chrome://tracing knows; Perfetto chooses by itself


def trace(run: Run) -> bytes:
    """Return the trace of all that was recorded of a run, as a JSON object.

    Without recorded pieces of work these are the run's steps by their sums, the last
    2,000 of them.
    """
    recorded = timelines(run) or list(sums(run))
    found = {
        "traceEvents": [*names(run.name, recorded), *events(recorded)],
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "made by": "lockstep"},
    }
    return json.dumps(found, separators=(",", ":")).encode()


def sums(run: Run) -> Iterator[Timeline]:
    """Yield the last steps by their sums, each after the one before."""
    count, end = len(run.steps), 0.0
    for at in range(max(0, count - STEPS), count if run.steps.ranks.size else 0):
        step = of_steps(run, at, at + 1)
        step = replace(step, origin=max(end, step.origin))
        end = step.origin + step.length
        yield step


def names(name: str, recorded: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Return the events that name the process and its threads."""
    ranks = max((one.ranks for one in recorded), default=0)
    given: list[tuple[str, int, dict[str, Any]]] = []
    given.append(("process_name", 0, {"name": f"lockstep: {name}"}))
    for rank in range(ranks):
        given.append(("thread_name", rank, {"name": f"rank {rank}"}))
        given.append(("thread_sort_index", rank, {"sort_index": rank}))
    return [
        {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": arguments}
        for what, thread, arguments in given
    ]


def events(recorded: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Yield the slices and arrows of some timelines, placed on one clock."""
    start = min((one.origin for one in recorded), default=0.0)
    arrow = 0
    for one in recorded:
        at = one.origin - start
        for rank in range(one.ranks):
            own = [work for work in one.works if work.rank == rank]
            yield from slices(one.title, rank, own, at)
        for source, target in transfers(one):
            arrow += 1
            yield from arrows(source.moved(at), target.moved(at), arrow)


def slices(title: str, rank: int, works: Sequence[Work], at: float) -> Iterator[dict[str, Any]]:
    """Yield one rank's step, and within it the work and the waiting."""
    if not works:
        return
    begin = min(work.begin - work.waited for work in works)
    end = max(work.end for work in works)
    yield piece(title, "step", rank, at + begin, at + end, {})
    before = begin
    for work in sorted(works, key=lambda work: work.begin):
        waiting = min(work.waited, work.begin - before)
        if waiting > 0:
            whom = "" if work.source is None else f" for rank {work.source}"
            times = (at + work.begin - waiting, at + work.begin)
            yield piece(f"waiting{whom}", "waiting", rank, *times, {})
        before = max(before, work.end)
        yield piece(work.words, work.kind, rank, at + work.begin, at + work.end, about(work))


def piece(
    name: str, kind: str, rank: int, begin: float, end: float, about: dict[str, Any]
) -> dict[str, Any]:
    """Return one slice; times in seconds."""
    ts = microseconds(begin)
    found = {
        "ph": "X", "name": name, "cat": kind, "pid": PROCESS, "tid": rank, "ts": ts,
        "dur": round(max(0.0, microseconds(end) - ts), 3), "args": about,
    }  # fmt: skip
    return found | ({"cname": COLOURS[kind]} if kind in COLOURS else {})


def about(work: Work) -> dict[str, Any]:
    """Return what is known of a piece of work beside its times."""
    given = {
        "micro-batch": work.microbatch,
        "stage": work.stage,
        "from rank": work.source,
        "bytes": work.octets or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def transfers(timeline: Timeline) -> Iterator[tuple[Work, Work]]:
    """Yield who made what another rank took: outputs go a stage up, gradients one down."""
    made: dict[tuple[str, int, int], Work] = {}
    taken: list[tuple[tuple[str, int, int], Work]] = []
    for work in timeline.works:
        if work.stage is None or work.microbatch is None:
            continue
        if work.kind == "forward":
            made["output", work.stage, work.microbatch] = work
            taken.append((("output", work.stage - 1, work.microbatch), work))
        elif work.kind in ("backward", "input"):
            made["gradient", work.stage, work.microbatch] = work
            taken.append((("gradient", work.stage + 1, work.microbatch), work))
    for key, work in taken:
        if key in made and made[key].rank != work.rank:
            yield made[key], work


def arrows(source: Work, target: Work, number: int) -> list[dict[str, Any]]:
    """Return the two ends of an arrow, each within its slice."""
    given = {"name": "transfer", "cat": "transfer", "id": number, "pid": PROCESS}
    # The beginning of an arrow belongs to the slice that encloses it.
    leaves = microseconds((source.begin + source.end) / 2)
    return [
        {"ph": "s", **given, "tid": source.rank, "ts": leaves},
        {"ph": "f", "bp": "e", **given, "tid": target.rank, "ts": microseconds(target.begin)},
    ]


def microseconds(seconds: float) -> float:
    """Return seconds as the trace has them."""
    return round(1e6 * seconds, 3)
