"""Axes: which range a chart shows, where its ticks are, and what they say."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.formatting import format_count, format_number

__all__ = ["Axis", "Tick", "linear", "logarithmic", "spanning"]

TINY = 1e-300  # below it numbers lose digits, and their fractions become 0
Column = npt.NDArray[np.float64]
Label = Callable[[float], str]


@dataclass(frozen=True)
class Tick:
    """A tick at `place`, 0 (the axis's beginning) to 1 (its end)."""

    place: float
    label: str


@dataclass(frozen=True)
class Axis:
    """A range from `low` to `high`, linear or logarithmic, with its ticks."""

    low: float
    high: float
    is_log: bool = False
    ticks: tuple[Tick, ...] = ()

    def place(self, values: Column) -> Column:
        """Return where `values` lie, 0 to 1; NaN where a logarithm has no place for them.

        What lies beyond the axis lies at its end.
        """
        low, high = self.low, self.high
        if self.is_log:
            values = np.log(np.where(values > 0, values, np.nan))
            low, high = math.log(low), math.log(high)
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def with_ticks(self, marks: Sequence[float], label: Label) -> Axis:
        """Return the axis with a tick at each of `marks`."""
        places = self.place(np.array(marks, dtype=np.float64)).tolist()
        named = zip(places, labels(marks, label), strict=True)
        return replace(self, ticks=tuple(Tick(at, text) for at, text in named))


def linear(low: float, high: float, label: Label = format_number, count: int = 5) -> Axis:
    """Return an axis that reaches to round numbers beyond `low` and `high`."""
    if not high - low > TINY:
        margin = abs(low) * 0.1 if abs(low) > 10 * TINY else 0.5
        low, high = low - margin, high + margin
    step = round_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [number * step for number in range(first, last + 1)]
    return Axis(marks[0], marks[-1]).with_ticks(marks, label)


def spanning(low: float, high: float, label: Label = format_count, count: int = 6) -> Axis:
    """Return an axis from exactly `low` to exactly `high`, with round whole numbers between."""
    if not high > low:
        high = low + 1
    step = max(1.0, round_step((high - low) / count))
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low, high).with_ticks([number * step for number in numbers], label)


def logarithmic(low: float, high: float, label: Label = format_number) -> Axis:
    """Return a logarithmic axis for positive values, with round numbers as ticks.

    It reaches down from `high` by twelve decades at most.
    """
    low = max(low, high * 1e-12)
    if not high > low * (1 + 1e-9):  # narrower, it has no inside
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    marks = next(filter(lambda found: len(found) >= 2, log_marks(low, high)), [low, high])
    return Axis(low, high, is_log=True).with_ticks(marks, label)


def labels(marks: Sequence[float], label: Label) -> list[str]:
    """Return what the ticks say; numbers get as many digits as tell them apart."""
    found = [tidy(label(mark)) for mark in marks]
    digits = 4
    while label is format_number and len(set(found)) < len(set(marks)) and digits <= 15:
        found = [f"{mark:.{digits}g}" for mark in marks]
        digits += 1
    return found


def log_marks(low: float, high: float) -> list[list[float]]:
    """Return candidates for a logarithmic axis's ticks, the fewest first."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, round(len(decades) / 6))
    candidates = []
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        found = [d * 10.0**n for n in decades if n % every == 0 for d in digits]
        candidates.append([mark for mark in found if low <= mark <= high])
    return [found for found in candidates if len(found) >= 3] + candidates[-1:]


def round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 or 10 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10, 20) if digit * power >= rough * 0.999)


def tidy(label: str) -> str:
    """Drop a label's needless zeros: "0.500" is "0.5", "20.0 ms" is "20 ms"."""
    return (
        re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", label)
        .replace(".%", "%")
        .replace(". ", " ")
        .rstrip(".")
    )
