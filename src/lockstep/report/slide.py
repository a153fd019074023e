"""The slide: one run on one picture of 16 to 9, for a talk or an issue.

name, state                      figures
headline
┌ loss ───────────┐ ┌ a metric ───────┐     (time of a step where there is no metric)
└─────────────────┘ └─────────────────┘
where the time went, by rank     digest
"""

from __future__ import annotations

import itertools

import numpy as np

from lockstep.formatting import format_duration, format_percent
from lockstep.record.reader import Run
from lockstep.record.recorder import PARTS
from lockstep.report.axes import Axis, Column
from lockstep.report.breakdown import rank_splits, shares
from lockstep.report.chart import Chart, Series, curves
from lockstep.report.picture import Area, Box, Dot, Label, Line, Picture, Point, text_width
from lockstep.report.summary import Summary, summarise
from lockstep.report.summary_text import STATES, headline, trouble

__all__ = ["draw"]

WIDTH, HEIGHT, MARGIN = 1200, 675, 56
INK, SOFT, FAINT, PAPER, WASH = "#16202e", "#5a6675", "#e4e8ee", "#ffffff", "#f5f7fa"
LINES = ("#0b6bb8", "#d1570c")
BANDS = ("#b5d3ec", "#f3cdb4")
FILLS = dict(zip(PARTS, ("#0b6bb8", "#e3a008", "#aab4c0", "#b9509a"), strict=True))
COLOURS = {"done": "#157f4d", "failed": "#b3261e", "died": "#b3261e", "running": "#8a5a00"}
RANKS = 4  # ranks drawn at most
DOTS = 40  # evaluations drawn as dots; more are a line


def draw(run: Run) -> Picture:
    """Return the picture of `run`."""
    summary = summarise(run)
    first, second = headline(run, summary)
    picture = Picture(WIDTH, HEIGHT, PAPER, f"{summary.name}: {first}")
    header(picture, run, summary)
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 122, first, 21, INK, width=room),
        Label(MARGIN, 150, trouble(run, summary) or second, 15, SOFT, width=room),
    )
    half = (room - 48) / 2
    for number, chart in enumerate(curves(run)[:2]):  # loss and a metric, or the steps' time
        plot(picture, chart, MARGIN + number * (half + 48), 192, half, 266)
    splits(picture, run, MARGIN, 506, half + 90)
    foot(picture, summary, MARGIN + half + 160, 506, half - 112)
    return picture


def header(picture: Picture, run: Run, summary: Summary) -> None:
    """Draw the run's name and how it stands."""
    colour = COLOURS[run.state]
    picture.add(
        Label(MARGIN, 82, summary.name, 36, INK, bold=True, width=800),
        Label(WIDTH - MARGIN, 80, STATES[run.state], 18, colour, "end", bold=True),
    )


def plot(picture: Picture, chart: Chart, x: float, y: float, width: float, height: float) -> None:
    """Draw a chart into the box at (x, y)."""
    left, top, bottom = x + 52, y + 24, y + height - 24
    axis = chart.linear
    picture.add(Label(x, y + 4, chart.title, 17, INK, bold=True))
    legend(picture, chart, x + width, y + 4)
    for tick in axis.ticks:
        at = bottom - tick.place * (bottom - top)
        picture.add(
            Line([(left, at), (x + width, at)], FAINT, 1),
            Label(left - 8, at + 4, tick.label, 12, SOFT, "end"),
        )
    for tick in chart.x.ticks:
        at = left + tick.place * (x + width - left)
        picture.add(Label(at, bottom + 18, tick.label, 12, SOFT, "middle"))
    box = (left, top, x + width, bottom)
    for draw_one in (draw_band, draw_line):
        for series in chart.series:
            draw_one(picture, series, chart.x, axis, box)


def legend(picture: Picture, chart: Chart, right: float, y: float) -> None:
    """Draw the curves' names, right-aligned, where there are several."""
    if len(chart.series) < 2:
        return
    for series in reversed(chart.series):
        picture.add(Label(right, y, series.name, 13, SOFT, "end"))
        right -= text_width(series.name, 13) + 10
        picture.add(Dot(right, y - 4.5, 4.5, LINES[series.colour % 2]))
        right -= 20


Frame = tuple[float, float, float, float]


def draw_band(picture: Picture, series: Series, x: Axis, y: Axis, box: Frame) -> None:
    """Draw the area between a thinned curve's lowest and highest values."""
    curve = series.curve
    if not curve.is_thinned or series.role != "line":
        return
    across = x.place(curve.x)
    over = points(across, y.place(curve.high), box)
    under = points(across, y.place(curve.low), box)
    for high, low in zip(over, under, strict=True):
        if len(high) > 1:
            colour = BANDS[series.colour % 2]
            outline = [*high, *reversed(low)]  # its line keeps a peak of one step in sight
            picture.add(Area(outline, colour), Line([*outline, high[0]], colour, 1.25))


def draw_line(picture: Picture, series: Series, x: Axis, y: Axis, box: Frame) -> None:
    """Draw a curve, or its points."""
    colour = LINES[series.colour % 2]
    stretches = points(x.place(series.curve.x), y.place(series.curve.mean), box)
    for stretch in stretches:
        if (series.role == "dots" and len(series.curve) <= DOTS) or len(stretch) == 1:
            picture.add(*(Dot(across, down, 4, colour) for across, down in stretch))
        else:
            picture.add(Line(stretch, colour, 1.75))


def points(x: Column, y: Column, box: Frame) -> list[list[Point]]:
    """Return the stretches of finite points within a box, in the picture's coordinates."""
    left, top, right, bottom = box
    across = left + x * (right - left)
    down = bottom - y * (bottom - top)
    finite = (np.isfinite(across) & np.isfinite(down)).tolist()
    pairs = zip(finite, zip(across.tolist(), down.tolist(), strict=True), strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [[point for _, point in group] for known, group in groups if known]


def splits(picture: Picture, run: Run, x: float, y: float, width: float) -> None:
    """Draw where the time went, a bar a rank."""
    rows = rank_splits(run)
    if not rows:
        return
    picture.add(Label(x, y, "Where the time went", 17, INK, bold=True))
    for number, row in enumerate(rows[:RANKS]):
        top = y + 18 + number * 22
        at, room = x + 56, (width - 140) * row.length
        picture.add(Label(x, top + 12, f"rank {row.rank}", 13, SOFT))
        for name, share in row.shares.items():
            picture.add(Box(at, top, room * share, 16, FILLS[name]))
            at += room * share
        picture.add(Label(x + width, top + 12, format_duration(row.seconds), 13, INK, "end"))
    at, down = x + 56, y + 18 + min(len(rows), RANKS) * 22 + 16
    for name, share in shares(run).items():
        text = f"{name} {format_percent(share)}"
        picture.add(Dot(at + 5, down - 4.5, 4.5, FILLS[name]), Label(at + 14, down, text, 12, SOFT))
        at += text_width(text, 12) + 30
    if len(rows) > RANKS:
        picture.add(Label(x + width, down, f"{len(rows) - RANKS} more ranks", 12, SOFT, "end"))


def foot(picture: Picture, summary: Summary, x: float, y: float, width: float) -> None:
    """Draw the digest in four lines, and who drew this."""
    picture.add(
        Label(x, y, "Digest of the weights" if summary.digest else "", 17, INK, bold=True),
        Label(WIDTH - MARGIN, HEIGHT - 22, "lockstep report", 12, SOFT, "end"),
    )
    parts = [summary.digest[at : at + 16] for at in range(0, len(summary.digest), 16)]
    for number, part in enumerate(parts):
        row, column = divmod(number, 2)
        picture.add(Label(x + column * (width / 2 + 8), y + 32 + row * 24, part, 15, INK))
