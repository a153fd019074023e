"""Charts: axes with round numbers, curves, and their drawing.

A curve of a million steps is downsampled to a few hundred points that preserve its peaks:

    values    . . ' . . , . . | . ' . . . . ^ . | ...        n values
    buckets   [low, mean, high] [low, mean, high] ...        at most `buckets`

Each bucket keeps its minimum and maximum beside its mean, which are drawn as a band, so that an
outlier of one step in a million is drawn at its full height. Non-finite values are ignored; a
bucket without finite values is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.formatting import format_number
from lockstep.tools.report.picture import Area, Dot, Label, Line, Picture, Point

__all__ = ["Axis", "Curve", "Tick", "downsample", "draw_chart", "linear_axis", "log_axis"]

Column = npt.NDArray[np.float64]
Format = Callable[[float], str]

MIN_RANGE = 1e-300  # smaller numbers lose digits, and their fractions become 0
BAND_OPACITY = 0.25
# the margins for the labels, and the size of their text, in points
LEFT = 64
BOTTOM = 24
TEXT = 12
NAME = 18  # the height of the name of an axis, in points


@dataclass(frozen=True)
class Tick:
    """A tick at `position`, from 0 (the beginning of the axis) to 1 (its end)."""

    position: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A range from `low` to `high`, linear or logarithmic, with its ticks."""

    low: float
    high: float
    is_log: bool = False
    ticks: tuple[Tick, ...] = ()

    def positions(self, values: Column) -> Column:
        """Return the positions of `values` on the axis, from 0 to 1.

        Values beyond the axis are clipped to its ends. On a logarithmic axis, values that are not
        positive are NaN.
        """
        low = self.low
        high = self.high
        if self.is_log:
            values = np.log(np.where(values > 0, values, np.nan))
            low = math.log(low)
            high = math.log(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def with_ticks(self, marks: Sequence[float], label: Format) -> Axis:
        """Return the axis with a tick at each of `marks`."""
        positions = self.positions(np.array(marks, dtype=np.float64)).tolist()
        named = zip(positions, _tick_labels(marks, label), strict=True)
        return replace(self, ticks=tuple(Tick(at, text) for at, text in named))


def linear_axis(low: float, high: float, label: Format = format_number, count: int = 5) -> Axis:
    """Return an axis that extends to round numbers beyond `low` and `high`."""
    if not high - low > MIN_RANGE:
        margin = abs(low) * 0.1 if abs(low) > 10 * MIN_RANGE else 0.5
        low = low - margin
        high = high + margin
    step = _round_step((high - low) / count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    marks = [number * step for number in range(first, last + 1)]
    return Axis(marks[0], marks[-1]).with_ticks(marks, label)


def log_axis(low: float, high: float, label: Format = format_number) -> Axis:
    """Return a logarithmic axis for positive values, with round numbers as ticks.

    The axis covers at most twelve decades below `high`.
    """
    low = max(low, high * 1e-12)
    if not high > low * (1 + 1e-9):  # a narrower range would have no ticks
        low = low / 2
        high = high * 2
    margin = (high / low) ** 0.03
    low = low / margin
    high = high * margin
    marks = next(filter(lambda marks: len(marks) >= 2, _log_marks(low, high)), [low, high])
    return Axis(low, high, is_log=True).with_ticks(marks, label)


def _tick_labels(marks: Sequence[float], label: Format) -> list[str]:
    """Return the labels of ticks; numbers get enough digits to differ from each other."""
    labels = [_trim_zeros(label(mark)) for mark in marks]
    digits = 4
    while label is format_number and len(set(labels)) < len(set(marks)) and digits <= 15:
        labels = [f"{mark:.{digits}g}" for mark in marks]
        digits += 1
    return labels


def _log_marks(low: float, high: float) -> list[list[float]]:
    """Return candidates for the ticks of a logarithmic axis, the fewest ticks first."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, round(len(decades) / 6))
    candidates = []
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        marks = [d * 10.0**n for n in decades if n % every == 0 for d in digits]
        candidates.append([mark for mark in marks if low <= mark <= high])
    return [marks for marks in candidates if len(marks) >= 3] + candidates[-1:]


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 or 10 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10, 20) if digit * power >= rough * 0.999)


def _trim_zeros(label: str) -> str:
    """Remove trailing zeros of the number in a label: "20.0 ms" becomes "20 ms"."""
    short = re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", label)
    return short.replace(".%", "%").replace(". ", " ").rstrip(".")


@dataclass(frozen=True)
class Curve:
    """A curve through (`x`, `y`), with a band from `low` to `high`; NaN interrupts it.

    A curve that `is_dotted` consists of dots only.
    """

    name: str
    x: Column
    y: Column
    low: Column
    high: Column
    is_dotted: bool = False


def downsample(name: str, x: Column, y: Column, buckets: int) -> Curve:
    """Return the curve y(x) with at most `buckets` points.

    All buckets hold the same number of values, plus or minus one.

    Args:
        name: The name of the curve.
        x: The positions, ascending, at least one.
        y: The values, as many as positions.
        buckets: The maximum number of points.
    """
    starts = np.unique(np.arange(buckets) * len(x) // buckets)
    ends = np.append(starts[1:], len(x)) - 1
    finite = np.isfinite(y)
    known = np.add.reduceat(finite, starts, dtype=np.int64)
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    total = np.add.reduceat(np.where(finite, y, 0.0), starts)
    empty = known == 0
    mean = np.clip(total / np.where(empty, 1, known), low, high)
    low, mean, high = (np.where(empty, np.nan, part) for part in (low, mean, high))
    return Curve(name, x[starts] / 2 + x[ends] / 2, mean, low, high)


def draw_chart(
    picture: Picture,
    curves: Sequence[Curve],
    axes: tuple[Axis, Axis],
    box: tuple[float, float, float, float],
    colors: Sequence[str],
    ink: str,
    faint: str,
    x_name: str = "",
) -> None:
    """Draw curves with the ticks of their axes.

    Args:
        picture: The picture to draw on.
        curves: The curves.
        axes: The axes of x and y.
        box: The left, top, right and bottom of the chart with its labels, in points.
        colors: The color of each curve.
        ink: The color of the text.
        faint: The color of the grid.
        x_name: What the axis of x shows, such as "step"; "" if its labels say it.
    """
    left = box[0] + LEFT
    top = box[1]
    right = box[2]
    bottom = box[3] - BOTTOM
    if x_name:
        picture.add(Label((left + right) / 2, box[3] - 6, x_name, TEXT, ink, "middle"))
        bottom -= NAME
    across, up = axes
    for tick in up.ticks:
        at = bottom - tick.position * (bottom - top)
        picture.add(Line([(left, at), (right, at)], faint, 1))
        picture.add(Label(left - 8, at + 4, tick.label, TEXT, ink, "end"))
    for tick in across.ticks:
        at = left + tick.position * (right - left)
        picture.add(Label(at, bottom + 18, tick.label, TEXT, ink, "middle"))

    def place(x: Column, y: Column) -> list[Point]:
        columns = left + across.positions(x) * (right - left)
        rows = bottom - up.positions(y) * (bottom - top)
        return list(zip(columns.tolist(), rows.tolist(), strict=True))

    for curve, color in zip(curves, colors, strict=True):
        low = np.where(curve.low > 0, curve.low, up.low) if up.is_log else curve.low
        for part in _finite_runs(up.positions(curve.y)):
            x = curve.x[part]
            points = place(curve.x[part], curve.y[part])
            outline = place(x, curve.high[part]) + place(x, low[part])[::-1]
            if curve.is_dotted or len(points) == 1:
                picture.add(*(Dot(*point, 4, color) for point in points))
            else:
                picture.add(Area(outline, color, BAND_OPACITY), Line(points, color, 2))


def _finite_runs(values: Column) -> list[slice]:
    """Return the runs of finite values."""
    edges = np.diff(np.concatenate([[0], np.isfinite(values), [0]]))
    return [slice(first, last) for first, last in np.flatnonzero(edges).reshape(-1, 2).tolist()]
