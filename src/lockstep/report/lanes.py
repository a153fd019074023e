"""Lanes: a timeline in text, one line a rank.

    rank 0  0--1--2--      0=====3--1=====        0-- forward   0== backward
    rank 1     0--1--0=====2--1=====                            of micro-batch 0

Each piece of work begins with its micro-batch and is filled with its kind's sign,
so it is readable without colours too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lockstep.record.timeline import KINDS, Timeline, Work, shared
from lockstep.report.terminal import WIDE, width

__all__ = ["draw", "legend", "print_lanes", "scale_of"]

SIGNS = {"forward": "-", "backward": "=", "input": "<", "weight": "+", "communication": "~"}
STYLES = {
    "forward": "white on blue",
    "backward": "black on green",
    "input": "black on green",
    "weight": "black on yellow",
}
EACH = 3  # columns of the shortest piece of work, where there is room
TINY = 1e-12  # a time that counts as none
ROOM = 160  # columns of a drawing that no terminal limits


def draw(timeline: Timeline, scale: float) -> list[Text]:
    """Return a line for each rank; `scale` is the columns of one unit of time."""
    lines = []
    margin = margin_of(timeline)
    for rank in range(timeline.ranks):
        line = Text(f"rank {rank}".ljust(margin))
        for work in sorted((w for w in timeline.works if w.rank == rank), key=lambda w: w.begin):
            begin, end = (margin + round(time * scale) for time in (work.begin, work.end))
            line.append(" " * (min(begin, end) - len(line)))
            text = piece(timeline.label(work), work, end - max(begin, len(line)))
            line.append(text, STYLES.get(work.kind))
        lines.append(line)
    return lines


def scale_of(timelines: Sequence[Timeline], room: int | None = None) -> float:
    """Return the columns of one unit of time, the same for timelines under each other.

    Whole ones for the shortest work, three at most, if they fit into `room` columns
    (the terminal's by default). Otherwise the longest timeline fills the room.
    """
    room = (width() if width() < WIDE else ROOM) if room is None else room
    room = max(1, room - max(map(margin_of, timelines), default=0))
    times = (work.end - work.begin for one in timelines for work in one.works)
    shortest, longest = min(filter(TINY.__lt__, times), default=1.0), shared(timelines)
    if longest < TINY:
        return 0.0
    columns = room * (shortest / longest)
    return (min(EACH, math.floor(columns)) if columns >= 1 else columns) / shortest


def margin_of(timeline: Timeline) -> int:
    """Return the columns before the lanes, which hold the names."""
    return len(f"rank {max(0, timeline.ranks - 1)}") + 2


def piece(label: str, work: Work, columns: int) -> str:
    """Return one piece of work as text; a label that does not fit is left out."""
    sign = SIGNS.get(work.kind, ".")
    return (label if len(label) <= columns else "").ljust(max(0, columns), sign)


def legend(timeline: Timeline) -> list[str]:
    """Say what the signs mean, a phrase each."""
    return [f"0{SIGNS.get(kind, '.') * 2} {KINDS.get(kind, kind)}" for kind in timeline.kinds]


def print_lanes(timeline: Timeline, scale: float) -> None:
    """Print a timeline on the terminal, in colour where it shows them."""
    console = Console(width=WIDE, highlight=False)
    for line in draw(timeline, scale):
        console.print(line, soft_wrap=True)
