"""Tracks: timelines as a page draws them, a lane a rank, on one axis of time.

frame of a lane     svg stretched to the width, one rect a piece of work;
                    micro-batches are HTML over it, placed in per cent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.formatting import format_duration
from lockstep.record.timeline import KINDS, Timeline, Work, shared
from lockstep.report.axes import Axis, Tick, linear

__all__ = ["LANES", "Bar", "Lane", "Track", "tracks"]

LANES = 32  # ranks drawn at most
WIDTH = 10_000  # of a lane's own coordinates
LABELLED = 0.018  # a piece at least this share of the width bears its micro-batch
SHADES = 2


@dataclass(frozen=True)
class Bar:
    """A piece of work: where it is drawn, as what, and what the pointer is told."""

    x: int
    width: int
    kind: str
    shade: int
    label: str
    words: str

    @property
    def middle(self) -> float:
        """Where its label is, in per cent of the width."""
        return 100 * (self.x + self.width / 2) / WIDTH


@dataclass(frozen=True)
class Lane:
    """One rank's pieces of work."""

    rank: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Track:
    """One timeline; `hidden` counts the ranks that are not drawn."""

    title: str
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    legend: dict[str, str]
    hidden: int


def tracks(timelines: Sequence[Timeline]) -> list[Track]:
    """Lay out timelines under each other, on the axis of the longest."""
    axis = linear(0.0, shared(timelines) or 1.0, format_duration, count=6)
    return [track(one, axis) for one in timelines]


def track(timeline: Timeline, axis: Axis) -> Track:
    """Lay out one timeline."""
    ranks = min(timeline.ranks, LANES)
    lanes = [
        Lane(rank, tuple(bar(timeline, w, axis.high) for w in timeline.works if w.rank == rank))
        for rank in range(ranks)
    ]
    legend = {kind: KINDS[kind] for kind in timeline.kinds if kind in KINDS}
    return Track(timeline.title, tuple(lanes), axis.ticks, legend, timeline.ranks - ranks)


def bar(timeline: Timeline, work: Work, length: float) -> Bar:
    """Lay out one piece of work."""
    x, end = (round(WIDTH * time / length) for time in (work.begin, work.end))
    label = timeline.label(work) if end - x >= LABELLED * WIDTH else ""
    kind = work.kind if work.kind in KINDS else "other"
    shade = (work.stage or 0) // timeline.width % SHADES
    said = f"rank {work.rank}: {work.words}, {format_duration(work.end - work.begin)}"
    if work.waited > 0:
        whom = "" if work.source is None else f" for rank {work.source}"
        said += f", after waiting {format_duration(work.waited)}{whom}"
    return Bar(x, max(1, end - x), kind, shade, label, said)
