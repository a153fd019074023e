"""The roll: timelines as one picture, under each other, on one scale of time.

1f1b · 27.3% bubble                    the title of each
rank 0  [0][1][2][3]      [ 0  ][4]    a lane a rank
rank 1     [0][1][2][ 0  ][3][ 1  ]
[] forward  [] backward                once, at the foot
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.record.timeline import KINDS, Timeline, Work, shared
from lockstep.report.picture import Box, Label, Picture, text_width

__all__ = ["COLOURS", "roll"]

WIDTH, MARGIN, NAMES = 1200, 24, 62
LANE, GAP, TITLE, FOOT = 24, 4, 42, 40  # heights, in points
INK, SOFT, PAPER, WASH = "#16202e", "#5a6675", "#ffffff", "#f5f7fa"
COLOURS = {
    "forward": ("#0b6bb8", "#3f92d2", "#75b3e2", "#a5cfee"),
    "backward": ("#14825a", "#3f9f7c", "#74bd9f", "#a6d6c2"),
    "input": ("#00808c", "#3199a3", "#6bb8bf", "#a2d3d7"),
    "weight": ("#8a6d00", "#a88d2c", "#c2ac5e", "#d9ca92"),
}
"""The colours of each kind of work, of a rank's first stage, its second, ..."""


def roll(timelines: Sequence[Timeline], title: str) -> Picture:
    """Return the picture of some timelines."""
    heights = [TITLE + one.ranks * (LANE + GAP) for one in timelines]
    picture = Picture(WIDTH, sum(heights) + MARGIN + FOOT, PAPER, title)
    scale = (WIDTH - 2 * MARGIN - NAMES) / (shared(timelines) or 1.0)
    top = 0.0
    for timeline, height in zip(timelines, heights, strict=True):
        lanes(picture, timeline, top + TITLE, scale)
        picture.add(Label(MARGIN, top + TITLE - 12, timeline.title, 15, INK, bold=True))
        top += height
    kinds = [kind for kind in KINDS if any(kind in one.kinds for one in timelines)]
    foot(picture, kinds, top + MARGIN)
    return picture


def lanes(picture: Picture, timeline: Timeline, top: float, scale: float) -> None:
    """Draw the lanes of one timeline."""
    left = MARGIN + NAMES
    for rank in range(timeline.ranks):
        y = top + rank * (LANE + GAP)
        picture.add(
            Label(MARGIN, y + LANE - 7, f"rank {rank}", 13, SOFT),
            Box(left, y, timeline.length * scale, LANE, WASH, 2),
        )
    for work in timeline.works:
        y = top + work.rank * (LANE + GAP)
        x, room = left + work.begin * scale, (work.end - work.begin) * scale
        fill, ink = colours(timeline, work)
        picture.add(Box(x, y, max(room - 1, 0.5), LANE, fill, 2))
        label = "" if work.microbatch is None else f"{work.microbatch}"
        if label and text_width(label, 11) < room - 2:
            picture.add(Label(x + room / 2, y + LANE - 8, label, 11, ink, "middle"))


def colours(timeline: Timeline, work: Work) -> tuple[str, str]:
    """Return the colour of a piece of work, and of the text on it."""
    shades = COLOURS.get(work.kind, (SOFT,))
    shade = (work.stage or 0) // timeline.width % len(shades)
    return shades[shade], PAPER if shade < 2 else INK


def foot(picture: Picture, kinds: Sequence[str], y: float) -> None:
    """Draw what the colours mean."""
    x = float(MARGIN)
    for kind in kinds:
        picture.add(
            Box(x, y, 13, 13, COLOURS.get(kind, (SOFT,))[0], 2),
            Label(x + 19, y + 11, KINDS[kind], 13, SOFT),
        )
        x += 19 + text_width(KINDS[kind], 13) + 24
