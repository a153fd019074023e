"""The trace of a step: when each rank worked on what, in the steps that the record keeps.

    each rank   spans of its actions ──> its status ──────────────────────┐
    rank 0      all statuses, its own times of the update ────────────────┴──> a line "timeline"

The first ten steps are kept, and then every hundredth: in each, some 60 bytes per action
travel with the status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.model.step_context import Span
from lockstep.training.rank_status import RankStatus

__all__ = ["StepTrace", "make_span_row", "make_timeline_rows"]

FIRST, EVERY = 10, 100
DIGITS = 6  # of a second


@dataclass(frozen=True)
class StepTrace:
    """Keeps the spans of some steps; `offset` is the `clock_offset` of this rank in seconds."""

    offset: float = 0.0

    def covers(self, step: int) -> bool:
        """Return whether the record keeps this step."""
        return step < FIRST or step % EVERY == 0

    def rank0_time(self, begun: float) -> float:
        """Return a time of this rank's `time.perf_counter` by rank 0's clock."""
        return round(begun + self.offset, DIGITS)


def make_span_row(span: Span, begun: float) -> list[Any]:
    """Return a span as the record has it: it begins when the waiting is over."""
    begin = span.begin + span.waited - begun
    rounded = [round(each, DIGITS) for each in (begin, span.end - begun, span.waited)]
    source = None if span.source < 0 else span.source
    return [span.kind, span.stage, span.microbatch, *rounded, source, span.received]


def make_timeline_rows(
    statuses: Sequence[RankStatus], times: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Return the ranks of a line "timeline"; none where the step was not traced.

    Args:
        statuses: Of all ranks.
        times: When rank 0, by its own clock, had exchanged the statuses, reduced the
            gradients and stepped the optimizer. These end together on all ranks.
    """
    if not any(status.spans for status in statuses):
        return []
    rows = []
    for status in statuses:
        begin, middle, end = (round(time - status.begun, DIGITS) for time in times)
        update = [
            ["reduce", None, None, begin, middle, 0, None, 0],
            ["update", None, None, middle, end, 0, None, 0],
        ]
        rows.append({"begin": status.begun, "works": status.spans + update})
    return rows
