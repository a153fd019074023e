"""Axes of charts: the range, the positions of the ticks, and their labels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.formatting import format_count, format_number

__all__ = ["Axis", "Tick", "exact_axis", "linear_axis", "log_axis"]

MIN_RANGE = 1e-300  # smaller numbers lose digits, and their fractions become 0
Column = npt.NDArray[np.float64]
Label = Callable[[float], str]


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
        """Return the positions of `values` on the axis, 0 to 1.

        Values beyond the axis are at its ends; values without a logarithm are NaN on a
        logarithmic axis.
        """
        low, high = self.low, self.high
        if self.is_log:
            values = np.log(np.where(values > 0, values, np.nan))
            low, high = math.log(low), math.log(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def with_ticks(self, marks: Sequence[float], label: Label) -> Axis:
        """Return the axis with a tick at each of `marks`."""
        positions = self.positions(np.array(marks, dtype=np.float64)).tolist()
        named = zip(positions, _tick_labels(marks, label), strict=True)
        return replace(self, ticks=tuple(Tick(at, text) for at, text in named))


def linear_axis(low: float, high: float, label: Label = format_number, count: int = 5) -> Axis:
    """Return an axis that extends to round numbers beyond `low` and `high`."""
    if not high - low > MIN_RANGE:
        margin = abs(low) * 0.1 if abs(low) > 10 * MIN_RANGE else 0.5
        low, high = low - margin, high + margin
    step = _round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [number * step for number in range(first, last + 1)]
    return Axis(marks[0], marks[-1]).with_ticks(marks, label)


def exact_axis(low: float, high: float, label: Label = format_count, count: int = 6) -> Axis:
    """Return an axis from exactly `low` to exactly `high`, with round integers as ticks."""
    if not high > low:
        high = low + 1
    step = max(1.0, _round_step((high - low) / count))
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low, high).with_ticks([number * step for number in numbers], label)


def log_axis(low: float, high: float, label: Label = format_number) -> Axis:
    """Return a logarithmic axis for positive values, with round numbers as ticks.

    The axis covers at most twelve decades below `high`.
    """
    low = max(low, high * 1e-12)
    if not high > low * (1 + 1e-9):  # a narrower range has no ticks inside
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    marks = next(filter(lambda found: len(found) >= 2, _log_marks(low, high)), [low, high])
    return Axis(low, high, is_log=True).with_ticks(marks, label)


def _tick_labels(marks: Sequence[float], label: Label) -> list[str]:
    """Return the labels of ticks; numbers get enough digits to differ from each other."""
    found = [_trim_zeros(label(mark)) for mark in marks]
    digits = 4
    while label is format_number and len(set(found)) < len(set(marks)) and digits <= 15:
        found = [f"{mark:.{digits}g}" for mark in marks]
        digits += 1
    return found


def _log_marks(low: float, high: float) -> list[list[float]]:
    """Return candidates for the ticks of a logarithmic axis, the fewest ticks first."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, round(len(decades) / 6))
    candidates = []
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        found = [d * 10.0**n for n in decades if n % every == 0 for d in digits]
        candidates.append([mark for mark in found if low <= mark <= high])
    return [found for found in candidates if len(found) >= 3] + candidates[-1:]


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 or 10 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10, 20) if digit * power >= rough * 0.999)


def _trim_zeros(label: str) -> str:
    """Remove trailing zeros of the number in a label: "20.0 ms" becomes "20 ms"."""
    return (
        re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", label)
        .replace(".%", "%")
        .replace(". ", " ")
        .rstrip(".")
    )
