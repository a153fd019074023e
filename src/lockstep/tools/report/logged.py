"""The histograms and images that a script logged: the last one of each name.

They come from the record, which anybody may have written: an image is shown only if it is a PNG
file in base64, and a histogram only if it consists of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.formatting import format_count, format_number
from lockstep.record.reader import Run
from lockstep.tools.report.summary import number_or

__all__ = ["LoggedValue", "logged_histograms", "logged_images"]

PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]+={0,2}")
MAX_SHOWN = 12  # of each kind


@dataclass(frozen=True)
class LoggedValue:
    """An image in base64, or the heights of a histogram's bars as fractions of the highest."""

    name: str
    step: str
    value: Any
    description: str


def logged_images(run: Run) -> list[LoggedValue]:
    """Return the last image of each name."""
    return [
        LoggedValue(name, step, image, name)
        for name, step, image in _last_of_each(run, "image")
        if isinstance(image, str) and PNG.fullmatch(image)
    ]


def logged_histograms(run: Run) -> list[LoggedValue]:
    """Return the last histogram of each name."""
    histograms = []
    for name, step, value in _last_of_each(run, "histogram"):
        given = value if isinstance(value, dict) else {}
        listed = given.get("counts")
        counts = [number_or(count) for count in listed] if isinstance(listed, list) else []
        low, high = number_or(given.get("low")), number_or(given.get("high"))
        if not counts or not all(map(math.isfinite, (*counts, low, high))) or min(counts) < 0:
            continue
        description = (
            f"{format_count(sum(counts))} values from {format_number(low)} to {format_number(high)}"
        )
        if missing := number_or(given.get("nonfinite"), 0):
            description += f", and {format_count(missing)} that are not finite"
        heights = [count / max(1, *counts) for count in counts]
        histograms.append(LoggedValue(name, step, heights, description))
    return histograms


def _last_of_each(run: Run, kind: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the step and the value of the last lines that have a value of this kind."""
    last = {line["name"]: line for line in run.logged if kind in line}
    for name, line in list(last.items())[:MAX_SHOWN]:
        yield name, f"{number_or(line.get('step')):,.0f}", line[kind]
