"""The plot of a benchmark: time and bandwidth over size, on logarithmic axes.

A line connects the medians, and its band extends from the quantile 0.1 to 0.9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.formatting import format_bytes, format_duration, format_size
from lockstep.tools.bench.results import Measurement
from lockstep.tools.report.chart import Axis, Curve, draw_chart, log_axis
from lockstep.tools.report.picture import Label, Line, Picture, text_width

__all__ = ["draw"]

WIDTH = 1200
HEIGHT = 675
MARGIN = 56
INK = "#16202e"
SOFT = "#5a6675"
FAINT = "#e4e8ee"
PAPER = "#ffffff"
COLORS = ("#0b6bb8", "#d1570c", "#157f4d", "#b9509a", "#8a5a00", "#5b4bb3")
LABELS = 6  # the largest number of ticks on the size axis

FindValues = Callable[[Measurement], tuple[float, float, float]]


def draw(results: Sequence[Measurement], machine: str, command: str) -> Picture:
    """Plot all results of one collective: time and bandwidth, or times by the number of ranks."""
    done = [result for result in results if result.times]
    names = dict.fromkeys(one.backend for one in done)
    colors = {name: COLORS[at % len(COLORS)] for at, name in enumerate(names)}
    counts = sorted({one.ranks for one in done})
    panels: list[tuple[str, list[Measurement], FindValues, Callable[[float], str]]] = [
        (f"Time per call, {count} ranks", [one for one in done if one.ranks == count], _times,
         lambda time: format_duration(time / 1e6))
        for count in counts
    ]  # fmt: skip
    if len(counts) == 1 and done[0].busbw:
        panels.append(
            ("Bus bandwidth", done, _bandwidths, lambda value: f"{format_bytes(value * 1e9)}/s")
        )
    picture = Picture(WIDTH, HEIGHT, PAPER, done[0].collective)
    picture.add(
        Label(MARGIN, 76, done[0].collective, 34, INK, bold=True),
        Label(MARGIN, 108, machine, 17, SOFT, width=WIDTH - 2 * MARGIN),
        Label(MARGIN, HEIGHT - 24, command, 12, SOFT, width=WIDTH - 2 * MARGIN),
    )
    at = float(MARGIN)
    for name, color in colors.items():
        picture.add(Line([(at, 141), (at + 22, 141)], color, 3), Label(at + 30, 146, name, 15, INK))
        at += text_width(name, 15) + 58
    width = (WIDTH - 2 * MARGIN) / len(panels)
    for number, (title, shown, values, format_value) in enumerate(panels):
        left = MARGIN + number * width
        picture.add(Label(left, 188, title, 17, INK, bold=True))
        curves = _make_curves(shown, values)
        low = min(one.low.min() for one in curves)
        high = max(one.high.max() for one in curves)
        axes = _size_axis(shown), log_axis(float(low), float(high), format_value)
        box = (left, 208, left + width - 30, 620)
        draw_chart(
            picture,
            curves,
            axes,
            box,
            colors=[colors[one.name] for one in curves],
            ink=SOFT,
            faint=FAINT,
        )
    return picture


def _times(result: Measurement) -> tuple[float, float, float]:
    return result.quantile(0.1), result.median, result.quantile(0.9)


def _bandwidths(result: Measurement) -> tuple[float, float, float]:
    work = result.busbw * result.median
    return work / result.quantile(0.9), result.busbw, work / result.quantile(0.1)


def _make_curves(results: Sequence[Measurement], values: FindValues) -> list[Curve]:
    """Return one curve per contender, in order of appearance."""
    curves = []
    for name in dict.fromkeys(one.backend for one in results):
        mine = [one for one in results if one.backend == name]
        low, middle, high = np.array([values(one) for one in mine]).T
        x = np.array([max(one.size, 1) for one in mine], float)
        curves.append(Curve(name, x, middle, low, high))
    return curves


def _size_axis(results: Sequence[Measurement]) -> Axis:
    """Return the axis of sizes, with at most LABELS ticks."""
    sizes = sorted({float(max(one.size, 1)) for one in results})
    low, high = (sizes[0], sizes[-1]) if len(sizes) > 1 else (sizes[0] / 2, sizes[0] * 2)
    margin = (high / low) ** 0.03
    step = -(-len(sizes) // LABELS)
    return Axis(low / margin, high * margin, is_log=True).with_ticks(sizes[::step], format_size)
