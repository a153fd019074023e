"""The timeline of a run: the work of each rank over time.

    rank 0   ▓0▓1▓2▓3    ██0██▓4██1██▓5      one lane per rank, spans of work over time
    rank 1      ▓0▓1▓2██0██▓3██1██▓4

A timeline is either planned (a simulated schedule) or read from a record:

    {"kind": "timeline", "step": 7, "ranks": [{"begin": 812.1, "works": [[...], ...]}, ...]}
    {"kind": "step", "ranks": [[compute, communication, waiting, data], ...]}

Runs without pipeline stages record no spans. Their steps are drawn from the times per category in
the lines of steps, in the order in which a rank spends them: data, compute, waiting,
communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.messages import escape_control
from lockstep.record.columns import Line, Steps, as_dict, as_float
from lockstep.record.format import TIME_CATEGORIES
from lockstep.record.reader import Run

__all__ = [
    "KIND_NAMES",
    "Timeline",
    "TimelineSpan",
    "longest_duration",
    "parse_timeline",
    "read_timelines",
    "sum_steps",
    "typical_timeline",
]

MAX_LISTED = 1 << 20  # ranks: a damaged record must not fill the memory

KIND_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradient of the inputs",
    "weight": "gradients of the weights",
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting",
    "data": "data",
    "reduce": "sum over the replicas",
    "update": "optimizer",
}
"""The known kinds of work and their display names; other kinds are shown as recorded."""

TYPICAL_STEPS = 6  # steps in a timeline that is drawn from times per category
MAX_SECONDS = 1e9  # a record with longer times is damaged
SUM_ORDER = ("data", "compute", "waiting", "communication")


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A piece of work of one rank from `begin` to `end`, in the timeline's unit of time.

    Args:
        rank: The rank that worked.
        kind: The kind of work, a key of `KIND_NAMES` or another name.
        begin: The beginning of the work.
        end: The end of the work.
        stage: The pipeline stage. None: the work belongs to no stage.
        microbatch: The micro-batch. None: the work belongs to no micro-batch.
        waited: The time that the rank waited before `begin`.
        source: The rank that it waited for. None: it waited for no rank.
        num_bytes: The number of bytes that `source` sent.
    """

    rank: int
    kind: str
    begin: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    waited: float = 0.0
    source: int | None = None
    num_bytes: int = 0

    def shift(self, by: float) -> TimelineSpan:
        """Return the span moved later by `by`."""
        return replace(self, begin=self.begin + by, end=self.end + by)

    @property
    def description(self) -> str:
        """The work as a phrase, such as "forward of micro-batch 3 on stage 1"."""
        phrase = KIND_NAMES.get(self.kind, self.kind)
        phrase += "" if self.microbatch is None else f" of micro-batch {self.microbatch}"
        return phrase + ("" if self.stage is None else f" on stage {self.stage}")


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks, in order for each rank, with times from 0.

    `origin` is the time 0 of the timeline on the clock of the run; 0 for a planned timeline.
    """

    title: str
    num_ranks: int
    spans: tuple[TimelineSpan, ...]
    origin: float = 0.0

    @property
    def duration(self) -> float:
        """The end of the last span."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def busy_times(self) -> list[float]:
        """The time for which each rank works."""
        times = [0.0] * self.num_ranks
        for span in self.spans:
            if span.kind != "waiting":
                times[span.rank] += span.end - span.begin
        return times

    @property
    def bubble_fraction(self) -> float:
        """The fraction of the ranks' total time in which they are idle, from 0 to 1."""
        total = self.duration * self.num_ranks
        return max(0.0, 1 - math.fsum(self.busy_times) / total) if total > 0 else 0.0

    @property
    def load_balance(self) -> float:
        """The mean of the ranks' busy times divided by their maximum; 1 if all are equal."""
        most = max(self.busy_times, default=0.0)
        return math.fsum(self.busy_times) / self.num_ranks / most if most > 0 else 1.0

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages."""
        return 1 + max((span.stage for span in self.spans if span.stage is not None), default=-1)

    @property
    def kinds(self) -> list[str]:
        """The kinds of work that occur: known kinds in the order of `KIND_NAMES`, then others."""
        kinds = {span.kind for span in self.spans}
        return [kind for kind in KIND_NAMES if kind in kinds] + sorted(kinds - KIND_NAMES.keys())

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks that hold one copy of the model."""
        holders = {span.rank for span in self.spans if span.stage == 0}
        return max(1, self.num_ranks // len(holders)) if holders else 1

    def chunk(self, span: TimelineSpan) -> int:
        """Return the number of the span's stage among the stages of its rank, from 0."""
        return (span.stage or 0) // self.ranks_per_replica

    def label(self, span: TimelineSpan) -> str:
        """Return the micro-batch of a span, with a letter for the chunk if there are several."""
        if span.microbatch is None:
            return ""
        if self.num_stages <= self.ranks_per_replica:
            return f"{span.microbatch}"
        return f"{span.microbatch}{chr(ord('a') + self.chunk(span) % 26)}"


def longest_duration(timelines: Sequence[Timeline]) -> float:
    """Return the duration of the longest timeline, as the common scale of all."""
    return max((timeline.duration for timeline in timelines), default=0.0)


def typical_timeline(run: Run) -> Timeline | None:
    """Return the timeline of a typical step, or of six steps if no spans were recorded.

    The typical step is the recorded one of median duration in the last layout; the first recorded
    step is left out if there are others. Returns None if there are no spans and the run has one
    rank or no times.
    """
    recorded = read_timelines(run.layout_timelines)
    timelines = sorted(recorded[1:] or recorded, key=lambda one: one.duration)
    if timelines:
        return timelines[len(timelines) // 2]
    steps, ranks = run.layout_steps.ranks.shape[:2]
    if steps == 0 or ranks < 2:
        return None
    middle = max(0, min(steps - TYPICAL_STEPS, steps // 2))
    return sum_steps(run.layout_steps, middle, middle + TYPICAL_STEPS)


def read_timelines(lines: Sequence[Line]) -> list[Timeline]:
    """Return the valid timelines of lines of a record, such as `run.timelines`."""
    return [timeline for line in lines if (timeline := parse_timeline(line))]


def parse_timeline(line: Line) -> Timeline | None:
    """Return the timeline of one line of a record, from the wait before its first span on.

    Malformed spans are skipped. Returns None if no span is left.
    """
    rows = _as_list(line.get("ranks"))
    spans = [
        span
        for rank, row in enumerate(map(as_dict, rows))
        for entry in _as_list(row.get("works"))
        if (span := _parse_span(rank, as_float(row.get("begin", 0)), entry))
    ]
    if not spans:
        return None
    origin = min(span.begin - span.waited for span in spans)
    shifted = tuple(span.shift(-origin) for span in spans)
    return Timeline(escape_control(f"step {line.get('step')}"), len(rows), shifted, origin)


def _parse_span(rank: int, start: float, entry: Any) -> TimelineSpan | None:
    if not isinstance(entry, list) or len(entry) < 5:
        return None
    kind, stage, microbatch, begin, end, waited, source, num_bytes = [*entry, 0, None, 0][:8]
    times = (start + as_float(begin), start + as_float(end), as_float(waited or 0))
    is_valid = all(abs(time) < MAX_SECONDS for time in times)
    if not (is_valid and times[0] <= times[1] and times[2] >= 0):
        return None
    return TimelineSpan(
        rank=rank,
        kind=escape_control(str(kind)),
        begin=times[0],
        end=times[1],
        stage=_as_index(stage),
        microbatch=_as_index(microbatch),
        waited=times[2],
        source=_as_index(source),
        num_bytes=_as_index(num_bytes) or 0,
    )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_index(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def sum_steps(steps: Steps, first: int, last: int) -> Timeline:
    """Return the timeline of the steps at positions `first` to `last` - 1, from their times.

    If the record has summaries of the ranks, it has the ranks that these list.
    """
    rows = np.nan_to_num(steps.ranks[first:last])
    ranks = rows.shape[1]
    numbers = np.broadcast_to(np.arange(ranks), rows.shape[:2])
    if not ranks and steps.slowest.shape[1]:
        listed = np.nan_to_num(steps.slowest[first:last])
        numbers, rows = np.clip(listed[:, :, 0], 0, MAX_LISTED).astype(int), listed[:, :, 1:]
        ranks = int(numbers.max()) + 1
    compute, data = TIME_CATEGORIES.index("compute"), TIME_CATEGORIES.index("data")
    spans: list[TimelineSpan] = []
    begin = 0.0
    for row, of_ranks in zip(rows, numbers.tolist(), strict=True):
        slowest = of_ranks[int(np.argmax(row[:, compute] + row[:, data]))]
        for rank, seconds in zip(of_ranks, row.tolist(), strict=True):
            spans += _rank_spans(rank, seconds, begin, slowest)
        begin += float(row.sum(axis=1).max())
    names = steps.step[first:last]
    title = f"step {names[0]:,.0f}"
    if len(names) > 1:
        title = f"steps {names[0]:,.0f} to {names[-1]:,.0f}"
    origin = float(np.nan_to_num(steps.t[first])) - float(rows[0].sum(axis=1).max())
    return Timeline(title, ranks, tuple(spans), origin)


def _rank_spans(rank: int, row: list[float], begin: float, slowest: int) -> list[TimelineSpan]:
    seconds = dict(zip(TIME_CATEGORIES, row, strict=True))
    spans = []
    for kind in SUM_ORDER:
        if seconds[kind] > 0:
            source = slowest if kind == "waiting" else None
            spans.append(TimelineSpan(rank, kind, begin, begin + seconds[kind], source=source))
            begin += seconds[kind]
    return spans
