"""The plot of a benchmark: time and bandwidth over size, on logarithmic axes.

one number of ranks      time | bus bandwidth
several                  time, one panel per number of ranks

A line connects the medians, and a bar at each size extends from the quantile 0.1 to 0.9. The points
of the contenders at one size are drawn beside each other, so that no bar covers another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.formatting import format_bytes, format_duration, format_size
from lockstep.kernel.errors import UsageError
from lockstep.tools.bench.measured_collectives import COLLECTIVES
from lockstep.tools.bench.results import Result
from lockstep.tools.bench.workload import DTYPE
from lockstep.tools.report.chart import Axis, log_axis
from lockstep.tools.report.picture import Dot, Label, Line, Picture, Point, text_width

__all__ = ["check_format", "draw"]

WIDTH, HEIGHT, MARGIN = 1200, 675, 56
INK, SOFT, FAINT, PAPER = "#16202e", "#5a6675", "#e4e8ee", "#ffffff"
# the first backend, then the others; the memory copy is always gray
LINES = ("#0b6bb8", "#d1570c", "#157f4d", "#b9509a", "#8a5a00", "#5b4bb3")
BARS = ("#85b5db", "#e8ab86", "#8abfa6", "#dca8cd", "#c5ad80", "#ada5d9")
COPY, COPY_BAR = "#8793a1", "#c3c9d0"
BAR_WIDTH, BAR_STEP = 4, 5  # in points; the second between the bars of two contenders
PANELS = 4
LABELS = 6  # the largest number of ticks on the size axis


@dataclass(frozen=True)
class BenchCurve:
    """The medians of one contender over the sizes, with the quantiles 0.1 and 0.9."""

    name: str
    color: str
    bar: str
    x: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]


@dataclass(frozen=True)
class BenchPanel:
    """Curves under one title, with the function that labels the value axis."""

    title: str
    curves: list[BenchCurve]
    label: Callable[[float], str]


def check_format(path: Path) -> None:
    """Raise UsageError unless the suffix is .svg."""
    if path.suffix != ".svg":
        raise UsageError(f"--plot {path}: the suffix must be .svg")


def draw(results: list[Result], machine: str, command: str) -> Picture:
    """Plot all results of one collective."""
    workload = results[0].workload
    is_reduction = COLLECTIVES[workload.collective].is_reduction
    widths = sorted({result.ranks for result in results})
    ranks = ", ".join(map(str, widths)) + (" rank" if widths == [1] else " ranks")
    picture = Picture(WIDTH, HEIGHT, PAPER, f"{workload.collective}, {ranks}")
    kind = f"{DTYPE} SUM" if is_reduction else DTYPE
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 76, workload.collective, 34, INK, bold=True),
        Label(MARGIN, 108, f"{ranks}, {kind} · {machine}", 17, SOFT, width=room),
        Label(MARGIN, HEIGHT - 24, command, 12, SOFT, width=room - 150),
        Label(WIDTH - MARGIN, HEIGHT - 24, "lockstep bench", 12, SOFT, "end"),
    )
    legend(picture, results, 146)
    panels = make_panels(results, widths)
    gap = 40
    panel_width = (room - gap * (len(panels) - 1)) / len(panels)
    for number, panel in enumerate(panels):
        plot(picture, panel, MARGIN + number * (panel_width + gap), 184, panel_width, 430)
    return picture


def make_panels(results: list[Result], widths: list[int]) -> list[BenchPanel]:
    """Return one panel per number of ranks, or time and bandwidth if there is only one."""
    done = [result for result in results if result.times]
    if len(widths) > 1:
        return [
            BenchPanel(f"Time per call, {n} ranks", time_curves(pick(done, n)), time_label)
            for n in widths[:PANELS]
        ]
    panels = [BenchPanel("Time per call", time_curves(done), time_label)]
    if any(result.busbw for result in done):
        panels.append(BenchPanel("Bus bandwidth", bandwidth_curves(done), bandwidth_label))
    return panels


def pick(results: list[Result], ranks: int) -> list[Result]:
    """Return the results with that number of ranks."""
    return [result for result in results if result.ranks == ranks]


def time_label(microseconds: float) -> str:
    """Format a time for the axis."""
    return format_duration(microseconds / 1e6)


def bandwidth_label(gigabytes: float) -> str:
    """Format a bandwidth for the axis."""
    return f"{format_bytes(gigabytes * 1e9)}/s"


def time_curves(results: list[Result]) -> list[BenchCurve]:
    """Return the time curve of each contender."""

    def values(result: Result) -> tuple[float, float, float]:
        return result.quantile(0.1), result.median, result.quantile(0.9)

    return curves(results, values)


def bandwidth_curves(results: list[Result]) -> list[BenchCurve]:
    """Return the bus-bandwidth curve of each contender."""

    def values(result: Result) -> tuple[float, float, float]:
        factor = result.busbw * result.median
        return (factor / result.quantile(0.9), result.busbw, factor / result.quantile(0.1))

    return curves([result for result in results if result.busbw], values)


def curves(
    results: list[Result], values: Callable[[Result], tuple[float, float, float]]
) -> list[BenchCurve]:
    """Return one curve per contender, in order of appearance."""
    drawn = []
    for name, (color, bar) in colors(results).items():
        mine = sorted((r for r in results if r.contender.name == name), key=lambda r: r.size)
        low, middle, high = map(list, zip(*map(values, mine), strict=True))
        x = [float(max(result.size, 1)) for result in mine]
        drawn.append(BenchCurve(name, color, bar, x, low, middle, high))
    return drawn


def colors(results: list[Result]) -> dict[str, tuple[str, str]]:
    """Return the color of each contender and of its bars."""
    chosen: dict[str, tuple[str, str]] = {}
    for result in results:
        if result.contender.name in chosen:
            continue
        number = sum(1 for color, _ in chosen.values() if color != COPY) % len(LINES)
        chosen[result.contender.name] = (
            (COPY, COPY_BAR) if result.contender.is_copy else (LINES[number], BARS[number])
        )
    return chosen


def legend(picture: Picture, results: list[Result], y: float) -> None:
    """Draw the names of the contenders in a row."""
    at = float(MARGIN)
    for name, (color, _) in colors([result for result in results if result.times]).items():
        picture.add(Line([(at, y - 5), (at + 22, y - 5)], color, 3), Dot(at + 11, y - 5, 4, color))
        picture.add(Label(at + 30, y, name, 15, INK))
        at += text_width(name, 15) + 58


def plot(
    picture: Picture, panel: BenchPanel, x: float, y: float, width: float, height: float
) -> None:
    """Draw a panel with its upper left corner at (x, y)."""
    left, top, right, bottom = x + 64, y + 42, x + width, y + height - 34
    across, up = size_axis(panel.curves), value_axis(panel)
    picture.add(
        Label(x, y + 4, panel.title, 17, INK, bold=True),
        Label(x, y + 24, "median; bars: 10% to 90% of the calls", 12, SOFT),
        Label((left + right) / 2, bottom + 36, "size of the message", 12, SOFT, "middle"),
    )
    for tick in up.ticks:
        at = bottom - tick.position * (bottom - top)
        picture.add(
            Line([(left, at), (right, at)], FAINT, 1),
            Label(left - 8, at + 4, tick.label, 12, SOFT, "end"),
        )
    for tick in across.ticks:
        at = left + tick.position * (right - left)
        picture.add(
            Line([(at, top), (at, bottom)], FAINT, 1),
            Label(at, bottom + 18, tick.label, 12, SOFT, "middle"),
        )
    box = (left, top, right, bottom)
    shifts = [(n - (len(panel.curves) - 1) / 2) * BAR_STEP for n in range(len(panel.curves))]
    for curve, shift in zip(panel.curves, shifts, strict=True):
        high, low = (
            points(across, up, curve.x, edge, box, shift) for edge in (curve.high, curve.low)
        )
        picture.add(*(Line(ends, curve.bar, BAR_WIDTH) for ends in zip(high, low, strict=True)))
    for curve, shift in zip(panel.curves, shifts, strict=True):
        middle = points(across, up, curve.x, curve.middle, box, shift)
        picture.add(Line(middle, curve.color, 2))
        picture.add(*(Dot(*point, 3, curve.color) for point in middle))


def size_axis(curves: list[BenchCurve]) -> Axis:
    """Return the axis of sizes, with at most LABELS ticks."""
    sizes = sorted({size for curve in curves for size in curve.x}) or [1.0]
    low, high = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
    step = math.ceil(len(sizes) / LABELS)
    margin = (high / low) ** 0.03
    return Axis(low / margin, high * margin, is_log=True).with_ticks(sizes[::step], format_size)


def value_axis(panel: BenchPanel) -> Axis:
    """Return an axis that covers all values."""
    lows = [value for curve in panel.curves for value in curve.low]
    highs = [value for curve in panel.curves for value in curve.high]
    return log_axis(min(lows, default=1.0), max(highs, default=10.0), panel.label)


def points(
    across: Axis,
    up: Axis,
    x: list[float],
    y: list[float],
    box: tuple[float, float, float, float],
    shift: float,
) -> list[Point]:
    """Return the points of a curve in the coordinates of the picture, `shift` to the right."""
    left, top, right, bottom = box
    columns = left + across.positions(np.array(x)) * (right - left) + shift
    rows = bottom - up.positions(np.array(y)) * (bottom - top)
    return list(zip(columns.tolist(), rows.tolist(), strict=True))
