"""The trace of steps with pipeline stages: which rank did what, and when, for the timeline.

The first ten steps and every hundredth are traced. Each of the first `DETAILED_RANKS` ranks sends
its spans with its status.
"""

from __future__ import annotations

from typing import Any

from lockstep.kernel.rank_status import DETAILED_RANKS
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook
from lockstep.pipeline.stage_span import StageSpan
from lockstep.training.history import History

__all__ = ["StepTrace", "make_span_row", "make_timeline_rows"]

DIGITS = 6  # decimal digits of a second

Traced = list[tuple[float, list[list[Any]]]]
"""For each rank the time at which its step began, by rank 0's clock, and the rows of its spans."""


class StepTrace(StepHook):
    """The hook that traces some steps.

    Args:
        offset: The `clock_offset` of this rank, in seconds.
        history: The history, to which rank 0 writes the timelines.
    """

    name, first, every = "trace", 10, 100

    def __init__(self, offset: float, history: History) -> None:
        self._offset, self._history = offset, history

    def begin(self, step: StepContext, batch: Any) -> None:
        """Let the executor keep its spans."""
        step.spans = []

    def status(self, step: StepContext) -> Traced:
        """Return the spans of this rank; none from ranks beyond the first `DETAILED_RANKS`."""
        begun = step.times.begun
        if step.parallel.rank >= DETAILED_RANKS:
            return []
        rows = [make_span_row(span, begun) for span in step.spans or ()]
        return [(round(begun + self._offset, DIGITS), rows)]

    def merge(self, left: Traced, right: Traced) -> Traced:
        """Return the spans of two ranges of ranks."""
        return left + right

    def report(self, committed: CommittedStep) -> None:
        """Write the line of the step on rank 0."""
        step, times = committed.step, committed.step.times
        if step.parallel.rank == 0:
            ends = times.exchanged, times.reduced, times.updated
            rows = make_timeline_rows(committed.summary.hooks[self.name], ends)
            self._history.write("timeline", step=step.number, ranks=rows)


def make_span_row(span: StageSpan, begun: float) -> list[Any]:
    """Return a span as a row of the record; it begins when the waiting is over."""
    begin = span.begin + span.waited - begun
    rounded = [round(seconds, DIGITS) for seconds in (begin, span.end - begun, span.waited)]
    source = None if span.source < 0 else span.source
    return [span.kind, span.stage, span.microbatch, *rounded, source, span.received]


def make_timeline_rows(traced: Traced, ends: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Return the rows of a line "timeline", one for each traced rank.

    Args:
        traced: The spans of the ranks.
        ends: The times, by rank 0's clock, at which rank 0 had exchanged the statuses, reduced
            the gradients and stepped the optimizer. Each of these ends together on all ranks.
    """
    rows = []
    for begun, spans in traced:
        begin, middle, end = (round(time - begun, DIGITS) for time in ends)
        update = [
            ["reduce", None, None, begin, middle, 0, None, 0],
            ["update", None, None, middle, end, 0, None, 0],
        ]
        rows.append({"begin": begun, "works": spans + update})
    return rows
