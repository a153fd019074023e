"""The picture of pipelines: how much faster than one process, over the micro-batches.

2 ┤ ─ ─ ─ ─ ─ ─ ideal
  │      ╭──── lockstep
  │   ╭──╯ ╭── rpc
1 ┤───╯────╯
  └─1──2──4──8
"""

from __future__ import annotations

import math

from benchmarks.pipeline.comparison import Outcome, ideal
from benchmarks.pipeline.contenders import COPIES
from benchmarks.pipeline.table import is_pipeline, median_of
from lockstep.tools.report.picture import Dot, Label, Line, Picture, Point

__all__ = ["draw"]

WIDTH = 1200
HEIGHT = 675
MARGIN = 56
LEFT = 100
TOP = 150
RIGHT = 880
BOTTOM = 575
INK = "#16202e"
SOFT = "#5a6675"
FAINT = "#e4e8ee"
PAPER = "#ffffff"
COLOURS = {
    "rpc": "#157f4d", "torch-gloo": "#d1570c", "torch-lockstep": "#8a5a00", "torch-zb": "#b9509a",
    "lockstep-1f1b": "#0b6bb8", "lockstep-zb": "#5b4bb3", "lockstep-1f1b-cut": "#3f8fd0",
    "lockstep-zb-cut": "#8b7ddb", "driver": "#16202e",
}  # fmt: skip
APART = 20.0  # points between two names at least


def draw(everything: list[list[Outcome]], machine: str, command: str) -> Picture:
    """Return the picture of all numbers of micro-batches."""
    case = everything[0][0].case
    picture = Picture(WIDTH, HEIGHT, PAPER, "pipelines")
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 66, "Two stages against one process", 34, INK, bold=True),
        Label(MARGIN, 96, f"{case.net.sentence} · {machine}", 17, SOFT, width=room),
        Label(MARGIN, HEIGHT - 24, command, 12, SOFT, width=room - 150),
        Label(WIDTH - MARGIN, HEIGHT - 24, "lockstep bench", 12, SOFT, "end"),
    )
    splits = [outcomes[0].case.splits for outcomes in everything]
    curves = speedups(everything)
    values = [value for curve in curves.values() for _, value in curve]
    scale = Scale(splits, min([0.9, *values]), max([1.1, *values]))
    frame(picture, scale, splits)
    named = []
    for name, curve in curves.items():
        points = [scale.point(m, value) for m, value in curve]
        color = COLOURS.get(name, SOFT)
        picture.add(Line(points, color, 1 if name == "ideal" else 2.5))
        picture.add(*(Dot(*point, 4, color) for point in points))
        named.append((points[-1][1], name, curve[-1][1], color))
    names(picture, sorted(named))
    return picture


def speedups(everything: list[list[Outcome]]) -> dict[str, list[tuple[int, float]]]:
    """Return (micro-batches, times faster than one process) by contender, the ideal first."""
    found: dict[str, list[tuple[int, float]]] = {"ideal": []}
    for outcomes in everything:
        single = median_of(COPIES, outcomes)
        splits = outcomes[0].case.splits
        if single is None:
            continue
        found["ideal"].append((splits, single / ideal(single, splits)))
        for each in outcomes:
            if each.times and is_pipeline(each):
                found.setdefault(each.name, []).append((splits, single / each.median))
    return {name: curve for name, curve in found.items() if curve}


class Scale:
    """Micro-batches, by their logarithm, and speedups as points of the picture."""

    def __init__(self, splits: list[int], low: float, high: float) -> None:
        self._last = math.log(splits[-1])
        self._span = math.log(splits[-1] / splits[0]) or 1.0
        self.low = low
        self.high = high

    def point(self, splits: int, value: float) -> Point:
        """Return where a number lies."""
        x = RIGHT + (RIGHT - LEFT) * (math.log(splits) - self._last) / self._span
        y = BOTTOM - (BOTTOM - TOP) * (value - self.low) / (self.high - self.low)
        return x, y


def frame(picture: Picture, scale: Scale, splits: list[int]) -> None:
    """Draw the axes."""
    for fifth in range(math.ceil(5 * scale.low), math.floor(5 * scale.high) + 1):
        _, y = scale.point(splits[0], fifth / 5)
        picture.add(Line([(LEFT, y), (RIGHT, y)], FAINT, 1))
        picture.add(Label(LEFT - 12, y + 5, f"{fifth / 5:.1f}", 14, SOFT, "end"))
    for number in splits:
        x, _ = scale.point(number, scale.low)
        picture.add(Label(x, BOTTOM + 24, f"{number}", 14, SOFT, "middle"))
    picture.add(Label(LEFT, BOTTOM + 48, "micro-batches per batch", 14, SOFT))
    picture.add(
        Label(LEFT, TOP - 14, "times faster than one process of two side by side", 14, SOFT)
    )


def names(picture: Picture, named: list[tuple[float, str, float, str]]) -> None:
    """Write the names beside the curves' ends, one below the other."""
    last = -math.inf
    for y, name, value, color in named:
        last = max(y, last + APART)
        picture.add(Label(RIGHT + 16, last + 5, f"{name} {value:.2f}", 15, color))
