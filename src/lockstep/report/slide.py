"""The slide: one run as a 16:9 picture, for a talk or an issue.

name                                  state
headline
┌ loss ───────────┐ ┌ a metric ───────┐     (the duration of a step if there is no metric)
└─────────────────┘ └─────────────────┘
time by rank                     digest
"""

from __future__ import annotations

import itertools

import numpy as np

from lockstep.formatting import format_duration, format_percent
from lockstep.record.columns import Column
from lockstep.record.reader import Run
from lockstep.record.recorder import TIME_CATEGORIES
from lockstep.report.breakdown import time_by_rank, time_shares
from lockstep.report.chart import Axis, Chart, Series, run_charts
from lockstep.report.picture import Area, Box, Dot, Label, Line, Picture, Point, text_width
from lockstep.report.summary import Summary, summarize
from lockstep.report.summary_text import (
    STATE_NAMES,
    command_line,
    headline,
    learning_rate_text,
    state_sentence,
)

__all__ = ["draw_slide"]

WIDTH, HEIGHT, MARGIN = 1200, 675, 56
INK, SOFT, FAINT, PAPER, WASH = "#16202e", "#5a6675", "#e4e8ee", "#ffffff", "#f5f7fa"
MARK = "#aab4c0"  # color of the mark at a step at which the run was resumed
LINES = ("#0b6bb8", "#d1570c")
BANDS = ("#b5d3ec", "#f3cdb4")
FILLS = dict(zip(TIME_CATEGORIES, ("#0b6bb8", "#e3a008", "#aab4c0", "#b9509a"), strict=True))
COLORS = {"done": "#157f4d", "failed": "#b3261e", "died": "#b3261e"}
COLORS |= {"running": "#8a5a00", "stopped": "#8a5a00"}
MAX_RANKS = 4  # ranks that are drawn
MAX_DOTS = 40  # evaluations drawn as dots; more are drawn as a line


def draw_slide(run: Run) -> Picture:
    """Return the slide of a run."""
    summary = summarize(run)
    first, second = headline(run, summary)
    picture = Picture(WIDTH, HEIGHT, PAPER, f"{summary.name}: {first}")
    _draw_header(picture, run, summary)
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 122, first, 21, INK, width=room),
        Label(MARGIN, 150, state_sentence(run, summary) or second, 15, SOFT, width=room),
    )
    half = (room - 48) / 2
    for number, chart in enumerate(run_charts(run)[:2]):  # loss and a metric, or the steps' time
        _draw_chart(picture, chart, MARGIN + number * (half + 48), 192, half, 282)
    _draw_time(picture, run, MARGIN, 514, half + 90)
    _draw_digest(picture, run, summary, MARGIN + half + 160, 514, half - 112)
    return picture


def _draw_header(picture: Picture, run: Run, summary: Summary) -> None:
    """Draw the name and the state of the run."""
    color = COLORS[run.state]
    picture.add(
        Label(MARGIN, 82, summary.name, 36, INK, bold=True, width=800),
        Label(WIDTH - MARGIN, 80, STATE_NAMES[run.state], 18, color, "end", bold=True),
    )


def _draw_chart(
    picture: Picture, chart: Chart, x: float, y: float, width: float, height: float
) -> None:
    """Draw a chart into the box at (x, y)."""
    left, top, bottom = x + 52, y + 44, y + height - 32
    axis = chart.linear
    picture.add(Label(x, y + 4, chart.title, 17, INK, bold=True))
    _draw_legend(picture, chart, x + width, y + 4)
    picture.add(
        Label(x, y + 24, chart.y_name, 12, SOFT),
        Label((left + x + width) / 2, bottom + 34, "step", 12, SOFT, "middle"),
    )
    for tick in axis.ticks:
        at = bottom - tick.position * (bottom - top)
        picture.add(
            Line([(left, at), (x + width, at)], FAINT, 1),
            Label(left - 8, at + 4, tick.label, 12, SOFT, "end"),
        )
    for tick in chart.x.ticks:
        at = left + tick.position * (x + width - left)
        picture.add(Label(at, bottom + 18, tick.label, 12, SOFT, "middle"))
    for mark in chart.marks:
        at = left + mark.position * (x + width - left)
        picture.add(Line([(at, top), (at, bottom)], MARK, 1))
    box = (left, top, x + width, bottom)
    for draw_one in (_draw_band, _draw_line):
        for series in chart.series:
            draw_one(picture, series, chart.x, axis, box)


def _draw_legend(picture: Picture, chart: Chart, right: float, y: float) -> None:
    """Draw the names of the curves, right-aligned, if there are several."""
    if len(chart.series) < 2:
        return
    for series in reversed(chart.series):
        picture.add(Label(right, y, series.name, 13, SOFT, "end"))
        right -= text_width(series.name, 13) + 10
        picture.add(Dot(right, y - 4.5, 4.5, LINES[series.color % 2]))
        right -= 20


Frame = tuple[float, float, float, float]


def _draw_band(picture: Picture, series: Series, x: Axis, y: Axis, box: Frame) -> None:
    """Draw the area between the minimum and the maximum of a downsampled curve."""
    curve = series.curve
    if not curve.is_downsampled or series.role != "line":
        return
    across = x.positions(curve.x)
    over = _finite_runs(across, y.positions(curve.high), box)
    under = _finite_runs(across, y.positions(curve.low), box)
    for high, low in zip(over, under, strict=True):
        if len(high) > 1:
            color = BANDS[series.color % 2]
            outline = [
                *high,
                *reversed(low),
            ]  # a line keeps a peak of one step visible
            picture.add(Area(outline, color), Line([*outline, high[0]], color, 1.25))


def _draw_line(picture: Picture, series: Series, x: Axis, y: Axis, box: Frame) -> None:
    """Draw a curve as a line or as dots."""
    color = LINES[series.color % 2]
    runs = _finite_runs(x.positions(series.curve.x), y.positions(series.curve.mean), box)
    for points in runs:
        if (series.role == "dots" and len(series.curve) <= MAX_DOTS) or len(points) == 1:
            picture.add(*(Dot(across, down, 4, color) for across, down in points))
        else:
            picture.add(Line(points, color, 1.75))


def _finite_runs(x: Column, y: Column, box: Frame) -> list[list[Point]]:
    """Return the runs of finite points within a box, in the coordinates of the picture."""
    left, top, right, bottom = box
    across = left + x * (right - left)
    down = bottom - y * (bottom - top)
    finite = (np.isfinite(across) & np.isfinite(down)).tolist()
    pairs = zip(finite, zip(across.tolist(), down.tolist(), strict=True), strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [[point for _, point in group] for known, group in groups if known]


def _draw_time(picture: Picture, run: Run, x: float, y: float, width: float) -> None:
    """Draw the time of each rank by category, one bar per rank."""
    rows = time_by_rank(run)
    if not rows:
        return
    picture.add(Label(x, y, "Time by rank", 17, INK, bold=True))
    for number, row in enumerate(rows[:MAX_RANKS]):
        top = y + 18 + number * 22
        at, room = x + 56, (width - 140) * row.length
        picture.add(Label(x, top + 12, row.name, 13, SOFT))
        for name, share in row.shares.items():
            picture.add(Box(at, top, room * share, 16, FILLS[name]))
            at += room * share
        picture.add(Label(x + width, top + 12, format_duration(row.seconds), 13, INK, "end"))
    at, down = x + 56, y + 18 + min(len(rows), MAX_RANKS) * 22 + 16
    for name, share in time_shares(run).items():
        text = f"{name} {format_percent(share)}"
        picture.add(Dot(at + 5, down - 4.5, 4.5, FILLS[name]), Label(at + 14, down, text, 12, SOFT))
        at += text_width(text, 12) + 30
    if len(rows) > MAX_RANKS:
        picture.add(Label(x + width, down, f"{len(rows) - MAX_RANKS} more ranks", 12, SOFT, "end"))


def _draw_digest(
    picture: Picture, run: Run, summary: Summary, x: float, y: float, width: float
) -> None:
    """Draw the digest of the weights in two columns, and the line at the bottom."""
    rate = learning_rate_text(run)
    notes = [command_line(run), f"learning rate {rate}" if rate else ""]
    room = WIDTH - 2 * MARGIN - 150
    picture.add(
        Label(MARGIN, HEIGHT - 22, " · ".join(filter(None, notes)), 12, SOFT, width=room),
        Label(x, y, "Digest of the weights" if summary.digest else "", 17, INK, bold=True),
        Label(WIDTH - MARGIN, HEIGHT - 22, "lockstep report", 12, SOFT, "end"),
    )
    parts = [summary.digest[at : at + 16] for at in range(0, len(summary.digest), 16)]
    for number, part in enumerate(parts):
        row, column = divmod(number, 2)
        picture.add(Label(x + column * (width / 2 + 8), y + 32 + row * 24, part, 15, INK))
