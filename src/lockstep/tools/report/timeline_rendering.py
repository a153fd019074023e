"""Renderings of a timeline: text for a terminal, and lanes for an HTML page.

    rank 0  0--1--2--      0=====3--1=====        0-- forward   0== backward
    rank 1     0--1--0=====2--1=====                            of micro-batch 0

In both renderings each rank has a lane, and a span shows its micro-batch if there is room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from lockstep.formatting import format_duration
from lockstep.record.timeline import KIND_NAMES, Timeline, TimelineSpan, longest_duration
from lockstep.tools.report.chart import Axis, Tick, linear_axis
from lockstep.tools.report.terminal import UNLIMITED, terminal_width

__all__ = ["HTML_WIDTH", "MAX_LANES", "HtmlLane", "HtmlSpan", "HtmlTimeline"]
__all__ += ["layout_timelines", "print_timeline", "render_lines", "text_legend", "text_scale"]

# ---- text ----

SIGNS = {"forward": "-", "backward": "=", "input": "<", "weight": "+", "communication": "~"}
TEXT_STYLES = {
    "forward": "white on blue",
    "backward": "black on green",
    "input": "black on green",
    "weight": "black on yellow",
}
SHORTEST_COLUMNS = 3  # columns of the shortest span, where there is room
MIN_DURATION = 1e-12  # shorter times count as zero
DEFAULT_COLUMNS = 160  # width of a drawing that is not written to a terminal


def render_lines(timeline: Timeline, scale: float) -> list[Text]:
    """Return one line of text per rank, with `scale` columns per unit of time.

    A span is the number of its micro-batch, padded with the sign of its kind, so it is readable
    without colors. A number that does not fit is left out.
    """
    lines = []
    margin = _name_columns(timeline)
    for rank in range(timeline.num_ranks):
        line = Text(f"rank {rank}".ljust(margin))
        for span in sorted((s for s in timeline.spans if s.rank == rank), key=lambda s: s.begin):
            begin, end = (margin + round(time * scale) for time in (span.begin, span.end))
            line.append(" " * (min(begin, end) - len(line)))
            columns = max(0, end - max(begin, len(line)))
            label = timeline.label(span)
            text = (label if len(label) <= columns else "").ljust(columns, _sign(span.kind))
            line.append(text, TEXT_STYLES.get(span.kind))
        lines.append(line)
    return lines


def text_scale(timelines: Sequence[Timeline], columns: int | None = None) -> float:
    """Return the columns per unit of time for timelines that are drawn below each other.

    The shortest span gets at most three columns, and an integer number of them if the longest
    timeline then fits into `columns` (by default the width of the terminal). Otherwise the
    longest timeline fills `columns`.
    """
    if columns is None:
        columns = terminal_width() if terminal_width() < UNLIMITED else DEFAULT_COLUMNS
    columns = max(1, columns - max(map(_name_columns, timelines), default=0))
    times = (span.end - span.begin for one in timelines for span in one.spans)
    shortest = min(filter(MIN_DURATION.__lt__, times), default=1.0)
    longest = longest_duration(timelines)
    if longest < MIN_DURATION:
        return 0.0
    fitting = columns * (shortest / longest)
    return (min(SHORTEST_COLUMNS, math.floor(fitting)) if fitting >= 1 else fitting) / shortest


def text_legend(timeline: Timeline) -> list[str]:
    """Return the sign and the name of each kind of work."""
    return [f"0{_sign(kind) * 2} {KIND_NAMES.get(kind, kind)}" for kind in timeline.kinds]


def print_timeline(timeline: Timeline, scale: float) -> None:
    """Print a timeline, in color where the terminal shows colors."""
    console = Console(width=UNLIMITED, highlight=False)
    for line in render_lines(timeline, scale):
        console.print(line, soft_wrap=True)


def _name_columns(timeline: Timeline) -> int:
    return len(f"rank {max(0, timeline.num_ranks - 1)}") + 2


def _sign(kind: str) -> str:
    return SIGNS.get(kind, ".")


# ---- HTML ----

MAX_LANES = 32  # ranks that are drawn
HTML_WIDTH = 10_000  # range of a lane's coordinates, which the page stretches
MIN_LABELED = 0.018  # fraction of the width from which a span shows its micro-batch
HTML_SHADES = 2


@dataclass(frozen=True)
class HtmlSpan:
    """A span as the template draws it; `tooltip` is shown under the pointer."""

    x: int
    width: int
    kind: str
    shade: int
    label: str
    tooltip: str

    @property
    def middle(self) -> float:
        """The position of the label, in percent of the lane's width."""
        return 100 * (self.x + self.width / 2) / HTML_WIDTH


@dataclass(frozen=True)
class HtmlLane:
    """The spans of one rank."""

    rank: int
    spans: tuple[HtmlSpan, ...]


@dataclass(frozen=True)
class HtmlTimeline:
    """One timeline as the template draws it; `num_hidden` ranks are not drawn."""

    title: str
    lanes: tuple[HtmlLane, ...]
    ticks: tuple[Tick, ...]
    legend: dict[str, str]
    num_hidden: int


def layout_timelines(timelines: Sequence[Timeline]) -> list[HtmlTimeline]:
    """Lay out timelines for a page, on one axis of time."""
    axis = linear_axis(0.0, longest_duration(timelines) or 1.0, format_duration, count=6)
    return [_layout_timeline(one, axis) for one in timelines]


def _layout_timeline(timeline: Timeline, axis: Axis) -> HtmlTimeline:
    ranks = min(timeline.num_ranks, MAX_LANES)
    lanes = []
    for rank in range(ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        lanes.append(HtmlLane(rank, tuple(_layout_span(timeline, s, axis.high) for s in spans)))
    legend = {kind: KIND_NAMES[kind] for kind in timeline.kinds if kind in KIND_NAMES}
    hidden = timeline.num_ranks - ranks
    return HtmlTimeline(timeline.title, tuple(lanes), axis.ticks, legend, hidden)


def _layout_span(timeline: Timeline, span: TimelineSpan, duration: float) -> HtmlSpan:
    x, end = (round(HTML_WIDTH * time / duration) for time in (span.begin, span.end))
    tooltip = f"rank {span.rank}: {span.description}, {format_duration(span.end - span.begin)}"
    if span.waited > 0:
        source = "" if span.source is None else f" for rank {span.source}"
        tooltip += f", after waiting {format_duration(span.waited)}{source}"
    return HtmlSpan(
        x=x,
        width=max(1, end - x),
        kind=span.kind if span.kind in KIND_NAMES else "other",
        shade=timeline.chunk(span) % HTML_SHADES,
        label=timeline.label(span) if end - x >= MIN_LABELED * HTML_WIDTH else "",
        tooltip=tooltip,
    )
