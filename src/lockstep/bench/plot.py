"""The picture of a measurement: time and bandwidth over size, both logarithmic.

one number of ranks      time | bus bandwidth
several                  time, a panel for each
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.bench.collectives import COLLECTIVES
from lockstep.bench.peers import CopyPeer
from lockstep.bench.rounds import Result
from lockstep.bench.sizes import spoken
from lockstep.errors import FileError, UsageError
from lockstep.formatting import format_bytes, format_duration
from lockstep.report.axes import Axis, logarithmic
from lockstep.report.picture import Area, Dot, Label, Line, Picture, Point, text_width

__all__ = ["check_format", "draw", "save"]

WIDTH, HEIGHT, MARGIN = 1200, 675, 56
INK, SOFT, FAINT, PAPER = "#16202e", "#5a6675", "#e4e8ee", "#ffffff"
# the first backend, then the others; the memory copy is always grey
LINES = ("#0b6bb8", "#d1570c", "#157f4d", "#b9509a", "#8a5a00", "#5b4bb3")
BANDS = ("#d6e6f3", "#f8e3d6", "#d8ece1", "#f2dfec", "#ece3d2", "#e2dff2")
COPY, COPY_BAND = "#8793a1", "#eceff2"
PANELS = 4
LABELS = 6  # ticks of the size axis at most


@dataclass(frozen=True)
class Curve:
    """One contender's medians over the sizes, with a tenth and nine tenths."""

    name: str
    colour: str
    band: str
    x: list[float]
    low: list[float]
    middle: list[float]
    high: list[float]


@dataclass(frozen=True)
class Panel:
    """Curves under one heading, with what the ordinate says."""

    title: str
    curves: list[Curve]
    label: Callable[[float], str]


def check_format(path: Path) -> None:
    """Raise UsageError where the suffix is no picture's."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {path}: write a .svg or a .png")


def save(picture: Picture, path: Path) -> None:
    """Write the picture as its suffix says; FileError where that cannot be done."""
    try:
        if path.suffix == ".png":
            path.write_bytes(picture.png())
        else:
            path.write_text(picture.svg())
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from error


def draw(results: list[Result], machine: str, command: str) -> Picture:
    """Return the picture of all results of one collective."""
    order = results[0].order
    reduces = COLLECTIVES[order.collective].reduces
    widths = sorted({result.ranks for result in results})
    ranks = ", ".join(map(str, widths)) + (" rank" if widths == [1] else " ranks")
    picture = Picture(WIDTH, HEIGHT, PAPER, f"{order.collective}, {ranks}")
    kind = f"{order.dtype} {order.op}" if reduces else order.dtype
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 76, order.collective, 34, INK, bold=True),
        Label(MARGIN, 108, f"{ranks}, {kind} · {machine}", 17, SOFT, width=room),
        Label(MARGIN, HEIGHT - 24, command, 12, SOFT, width=room - 150),
        Label(WIDTH - MARGIN, HEIGHT - 24, "lockstep bench", 12, SOFT, "end"),
    )
    legend(picture, results, 146)
    panels = make_panels(results, widths)
    gap = 40
    each = (room - gap * (len(panels) - 1)) / len(panels)
    for number, panel in enumerate(panels):
        plot(picture, panel, MARGIN + number * (each + gap), 184, each, 430)
    return picture


def make_panels(results: list[Result], widths: list[int]) -> list[Panel]:
    """Return a panel for each number of ranks, or time and bandwidth of the only one."""
    done = [result for result in results if result.times]
    if len(widths) > 1:
        return [
            Panel(f"Time of a call, {n} ranks", time_curves(pick(done, n)), time_label)
            for n in widths[:PANELS]
        ]
    panels = [Panel("Time of a call", time_curves(done), time_label)]
    if any(result.busbw for result in done):
        panels.append(Panel("Bus bandwidth", bandwidth_curves(done), bandwidth_label))
    return panels


def pick(results: list[Result], ranks: int) -> list[Result]:
    """Return those of one number of ranks."""
    return [result for result in results if result.ranks == ranks]


def time_label(microseconds: float) -> str:
    """Return a time as the axis says it."""
    return format_duration(microseconds / 1e6)


def bandwidth_label(gigabytes: float) -> str:
    """Return a bandwidth as the axis says it."""
    return f"{format_bytes(gigabytes * 1e9)}/s"


def time_curves(results: list[Result]) -> list[Curve]:
    """Return each contender's times."""

    def values(result: Result) -> tuple[float, float, float]:
        return result.quantile(0.1), result.median, result.quantile(0.9)

    return curves(results, values)


def bandwidth_curves(results: list[Result]) -> list[Curve]:
    """Return each contender's bus bandwidths; the slow tenth is the lower edge."""

    def values(result: Result) -> tuple[float, float, float]:
        factor = result.busbw * result.median
        return (factor / result.quantile(0.9), result.busbw, factor / result.quantile(0.1))

    return curves([result for result in results if result.busbw], values)


def curves(
    results: list[Result], values: Callable[[Result], tuple[float, float, float]]
) -> list[Curve]:
    """Return a curve for each contender, in order of appearance."""
    found = []
    for name, (colour, band) in colours(results).items():
        mine = sorted((r for r in results if r.contender.name == name), key=lambda r: r.size)
        low, middle, high = map(list, zip(*map(values, mine), strict=True))
        x = [float(max(result.size, 1)) for result in mine]
        found.append(Curve(name, colour, band, x, low, middle, high))
    return found


def colours(results: list[Result]) -> dict[str, tuple[str, str]]:
    """Return each contender's colour and that of its band."""
    chosen: dict[str, tuple[str, str]] = {}
    for result in results:
        if result.contender.name in chosen:
            continue
        number = sum(1 for colour, _ in chosen.values() if colour != COPY) % len(LINES)
        is_copy = isinstance(result.contender.peer, CopyPeer)
        chosen[result.contender.name] = (
            (COPY, COPY_BAND) if is_copy else (LINES[number], BANDS[number])
        )
    return chosen


def legend(picture: Picture, results: list[Result], y: float) -> None:
    """Draw the contenders' names in a row."""
    at = float(MARGIN)
    for name, (colour, _) in colours([result for result in results if result.times]).items():
        picture.add(
            Line([(at, y - 5), (at + 22, y - 5)], colour, 3), Dot(at + 11, y - 5, 4, colour)
        )
        picture.add(Label(at + 30, y, name, 15, INK))
        at += text_width(name, 15) + 58


def plot(picture: Picture, panel: Panel, x: float, y: float, width: float, height: float) -> None:
    """Draw a panel into the box at (x, y)."""
    left, top, right, bottom = x + 64, y + 22, x + width, y + height - 26
    across, up = size_axis(panel.curves), value_axis(panel)
    picture.add(Label(x, y + 4, panel.title, 17, INK, bold=True))
    for tick in up.ticks:
        at = bottom - tick.place * (bottom - top)
        picture.add(
            Line([(left, at), (right, at)], FAINT, 1),
            Label(left - 8, at + 4, tick.label, 12, SOFT, "end"),
        )
    for tick in across.ticks:
        at = left + tick.place * (right - left)
        picture.add(
            Line([(at, top), (at, bottom)], FAINT, 1),
            Label(at, bottom + 18, tick.label, 12, SOFT, "middle"),
        )
    box = (left, top, right, bottom)
    for curve in panel.curves:
        high, low = (points(across, up, curve.x, edge, box) for edge in (curve.high, curve.low))
        picture.add(Area([*high, *reversed(low)], curve.band))
    for curve in panel.curves:
        middle = points(across, up, curve.x, curve.middle, box)
        picture.add(Line(middle, curve.colour, 2.25))
        picture.add(*(Dot(*point, 3.25, curve.colour) for point in middle))


def size_axis(curves: list[Curve]) -> Axis:
    """Return an axis of the sizes, with some of them as ticks."""
    sizes = sorted({size for curve in curves for size in curve.x}) or [1.0]
    low, high = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
    step = math.ceil(len(sizes) / LABELS)
    margin = (high / low) ** 0.03
    return Axis(low / margin, high * margin, is_log=True).with_ticks(sizes[::step], spoken)


def value_axis(panel: Panel) -> Axis:
    """Return an axis that holds all values."""
    lows = [value for curve in panel.curves for value in curve.low]
    highs = [value for curve in panel.curves for value in curve.high]
    return logarithmic(min(lows, default=1.0), max(highs, default=10.0), panel.label)


def points(
    across: Axis, up: Axis, x: list[float], y: list[float], box: tuple[float, float, float, float]
) -> list[Point]:
    """Return a curve's points in the picture's coordinates."""
    left, top, right, bottom = box
    columns = left + across.place(np.array(x)) * (right - left)
    rows = bottom - up.place(np.array(y)) * (bottom - top)
    return list(zip(columns.tolist(), rows.tolist(), strict=True))
