"""The drawing of the pipeline schedule, from its simulation."""

from __future__ import annotations

from lockstep.formatting import format_percent
from lockstep.pipeline.schedule import simulate
from lockstep.tools.report.picture import Box
from tools.drawings.shapes import INK, LEFT, RIGHT, SOFT, WASH, Card

__all__ = ["draw_schedule"]

P, M = 3, 6
LANE, GAP = 26, 4
NAME_WIDTH = 18
COLORS = {"forward": "#0b6bb8", "backward": "#14825a"}


def draw_schedule() -> Card:
    """Draw 1F1B."""
    spans = simulate(P, M)
    end = max(span.end for span in spans)
    bubble = 1 - sum(span.end - span.begin for span in spans) / (P * end)
    left, top = LEFT + NAME_WIDTH, 62
    bottom = top + P * (LANE + GAP)
    picture = Card(bottom + 54, f"The schedule 1f1b: {P} ranks")
    picture.add_text(LEFT, 22, "1f1b", 14, bold=True)
    picture.add_text(RIGHT, 22, f"{P} ranks, {M} micro-batches", 12, SOFT, "end")
    picture.add_text(LEFT, 48, "rank", 12, SOFT)
    picture.add_text(RIGHT, 48, "time →", 12, SOFT, "end")
    scale = (RIGHT - left) / end
    for rank in range(P):
        y = top + rank * (LANE + GAP)
        picture.add_text(LEFT, y + LANE / 2, str(rank), 12, SOFT)
        picture.add(Box(left, y, end * scale, LANE, WASH, 2))
    for span in spans:
        picture.add_cell(
            left + span.begin * scale,
            top + span.rank * (LANE + GAP),
            (span.end - span.begin) * scale - 1,
            LANE,
            str(span.action.microbatch),
            COLORS[span.action.kind],
            "#ffffff",
            12,
            1.5,
        )
    y = bottom + 10
    peaks = ", ".join(str(P - rank) for rank in range(P))
    picture.add_text(
        LEFT, y, f"{end:g} units, bubble {format_percent(bubble)}; held at most: {peaks}", 12, INK
    )
    for number, (label, color) in enumerate(COLORS.items()):
        x = LEFT + number * 184
        picture.add(Box(x, y + 18, 12, 12, color, 2))
        picture.add_text(x + 18, y + 24, label, 12, SOFT)
    return picture
