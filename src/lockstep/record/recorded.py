"""Timelines out of a record: pieces of work where they were recorded, else the steps' sums.

    {"kind": "timeline", "step": 7, "ranks": [{"begin": 812.1, "works": [[...], ...]}, ...]}
    {"kind": "step", "ranks": [[compute, communication, waiting, data], ...]}

A run of replicas alone records no pieces; its steps are drawn from their sums, in the
order in which a rank spends them: data, compute, waiting, communication.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.messages import escape_control
from lockstep.record.columns import Line, mapping, number
from lockstep.record.reader import Run
from lockstep.record.recorder import PARTS
from lockstep.record.timeline import Timeline, Work

__all__ = ["of_line", "of_steps", "timelines", "typical"]

SHOWN = 6  # steps in a timeline made of sums
UTMOST = 1e9  # seconds: a time beyond is none
ORDER = ("data", "compute", "waiting", "communication")


def typical(run: Run) -> Timeline | None:
    """Return what the report draws: of the recorded steps that of median length, or some sums.

    None where a rank was alone, or nothing is known.
    """
    found = sorted(timelines(run)[1:] or timelines(run), key=lambda one: one.length)
    if found:
        return found[len(found) // 2]
    steps, ranks = run.steps.ranks.shape[:2]
    if steps == 0 or ranks < 2:
        return None
    middle = max(0, min(steps - SHOWN, steps // 2))
    return of_steps(run, middle, middle + SHOWN)


def timelines(run: Run) -> list[Timeline]:
    """Return every step whose pieces of work were recorded."""
    return [found for line in run.timelines if (found := of_line(line))]


def of_line(line: Line) -> Timeline | None:
    """Return the timeline of one line; it begins with its first piece of work.

    What is no piece of work is passed over; None where nothing is left.
    """
    rows = listed(line.get("ranks"))
    works = [
        work
        for rank, row in enumerate(map(mapping, rows))
        for piece in listed(row.get("works"))
        if (work := work_of(rank, number(row.get("begin", 0)), piece))
    ]
    if not works:
        return None
    origin = min(work.begin - work.waited for work in works)
    moved = tuple(work.moved(-origin) for work in works)
    return Timeline(escape_control(f"step {line.get('step')}"), len(rows), moved, origin)


def work_of(rank: int, start: float, piece: Any) -> Work | None:
    """Return one piece of work; None if it is none."""
    if not isinstance(piece, list) or len(piece) < 5:
        return None
    kind, stage, microbatch, begin, end, waited, source, octets = [*piece, 0, None, 0][:8]
    times = (start + number(begin), start + number(end), number(waited or 0))
    if not (all(abs(time) < UTMOST for time in times) and times[0] <= times[1] and times[2] >= 0):
        return None
    stage, microbatch, source = (index(value) for value in (stage, microbatch, source))
    return Work(
        rank,
        escape_control(str(kind)),
        *times[:2],
        stage,
        microbatch,
        times[2],
        source,
        index(octets) or 0,
    )


def listed(value: Any) -> list[Any]:
    """Return a list; an empty one for what is none."""
    return value if isinstance(value, list) else []


def index(value: Any) -> int | None:
    """Return a number from 0; None for what is none."""
    return value if isinstance(value, int) and value >= 0 else None


def of_steps(run: Run, first: int, last: int) -> Timeline:
    """Return the steps in these places of the run, one at least, as a timeline of their sums."""
    steps = run.steps
    rows = np.nan_to_num(steps.ranks[first:last])
    ranks = rows.shape[1]
    works: list[Work] = []
    at = 0.0
    for row in rows:
        slowest = int(np.argmax(row[:, PARTS.index("compute")] + row[:, PARTS.index("data")]))
        for rank in range(ranks):
            works += pieces(rank, row[rank].tolist(), at, slowest)
        at += float(row.sum(axis=1).max())
    names = steps.step[first:last]
    title = f"step {names[0]:,.0f}"
    if len(names) > 1:
        title = f"steps {names[0]:,.0f} to {names[-1]:,.0f}"
    begin = float(np.nan_to_num(steps.t[first])) - float(rows[0].sum(axis=1).max())
    return Timeline(title, ranks, tuple(works), begin)


def pieces(rank: int, row: list[float], at: float, slowest: int) -> list[Work]:
    """Return what one rank did in one step; it waited for the slowest one."""
    seconds = dict(zip(PARTS, row, strict=True))
    found = []
    for kind in ORDER:
        if seconds[kind] > 0:
            source = slowest if kind == "waiting" else None
            found.append(Work(rank, kind, at, at + seconds[kind], source=source))
            at += seconds[kind]
    return found
