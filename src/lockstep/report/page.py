"""Pages: charts as inline SVG, and one self-contained HTML file around them.

A page loads nothing. Each scale of a chart is drawn here, so the page is whole
without a script; the script adds hover and the switch between the scales.

    frame of a chart     text keeps its size whatever the width:
      y labels │ svg (stretched to the width)     labels are HTML, placed in per cent,
               └ x labels                         strokes do not scale
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jinja2
import numpy as np

from lockstep.formatting import format_bytes, format_duration, format_percent
from lockstep.report.axes import Axis, Column, Tick
from lockstep.report.chart import Chart, Series

__all__ = ["Panel", "Stroke", "panel", "render"]

WIDTH, HEIGHT = 4000, 1000  # of the drawing's own coordinates
DOTS = 60  # evaluations up to which each is a dot; more are a line


@dataclass(frozen=True)
class Stroke:
    """One path: what it is ("band", "line", "dots"), its colour's number, its outline."""

    kind: str
    colour: int
    path: str


@dataclass(frozen=True)
class Scale:
    """A chart drawn on one vertical axis."""

    name: str
    ticks: tuple[Tick, ...]
    strokes: tuple[Stroke, ...]


@dataclass(frozen=True)
class Panel:
    """A chart as its template wants it; `data` is what the hover reads, as JSON."""

    key: str
    title: str
    x: tuple[Tick, ...]
    scales: tuple[Scale, ...]
    legend: tuple[Series, ...]
    data: str


def panel(chart: Chart) -> Panel:
    """Draw `chart` on each of its scales."""
    axes = [("linear", chart.linear)] + ([("log", chart.log)] if chart.log else [])
    scales = (Scale(name, axis.ticks, strokes(chart, axis)) for name, axis in axes)
    return Panel(chart.key, chart.title, chart.x.ticks, tuple(scales), chart.series, hover(chart))


def strokes(chart: Chart, y: Axis) -> tuple[Stroke, ...]:
    """Return the paths of a chart, bands below lines below dots."""
    found = [
        stroke for one in chart.series for stroke in series_strokes(one, chart.x, y) if stroke.path
    ]
    return tuple(sorted(found, key=lambda stroke: ("band", "line", "dots").index(stroke.kind)))


def series_strokes(series: Series, x: Axis, y: Axis) -> list[Stroke]:
    """Return the paths of one series."""
    curve = series.curve
    across = x.place(curve.x)
    middle = y.place(curve.mean)
    if series.role == "dots":
        kind = "dots" if len(curve) <= DOTS else "line"
        drawn = dots(across, middle) if kind == "dots" else line(across, middle)
        return [Stroke(kind, series.colour, drawn)]
    if np.isfinite(middle).sum() == 1:
        return [Stroke("dots", series.colour, dots(across, middle))]
    found = [Stroke("line", series.colour, line(across, middle))]
    if curve.is_thinned:
        outline = band(across, y.place(curve.low), y.place(curve.high))
        found.insert(0, Stroke("band", series.colour, outline))
    return found


def line(x: Column, y: Column) -> str:
    """Return the path through the points, broken where one is not finite."""
    return "".join(
        "M{} {}".format(*points[0]) + steps_from(points) for points in stretches(x, y) if points
    )


def band(x: Column, low: Column, high: Column) -> str:
    """Return the outline of the area between two curves."""
    bottom = np.where(np.isfinite(high), np.nan_to_num(low, nan=0.0), np.nan)
    found = []
    for over, under in zip(stretches(x, high), stretches(x, bottom), strict=True):
        points = over + under[::-1]
        found.append("M{} {}".format(*points[0]) + steps_from(points) + "z")
    return "".join(found)


def dots(x: Column, y: Column) -> str:
    """Return a path of strokes without length, which round caps turn into dots."""
    return "".join(f"M{at} {to}h0" for points in stretches(x, y) for at, to in points)


def stretches(x: Column, y: Column) -> list[list[tuple[int, int]]]:
    """Return the stretches of finite points, in the drawing's coordinates."""
    finite = np.isfinite(x) & np.isfinite(y)
    across = np.rint(np.where(finite, x, 0) * WIDTH).astype(int).tolist()
    down = np.rint(HEIGHT - np.where(finite, y, 0) * HEIGHT).astype(int).tolist()
    ends = np.flatnonzero(np.diff(np.concatenate([[0], finite, [0]]))).reshape(-1, 2)
    return [list(zip(across[first:last], down[first:last], strict=True)) for first, last in ends]


def steps_from(points: list[tuple[int, int]]) -> str:
    """Return the points after the first as relative moves: fewer bytes than absolute ones."""
    moves = [f"{x1 - x0} {y1 - y0}" for (x0, y0), (x1, y1) in pairwise(points)]
    return "l" + " ".join(moves).replace(" -", "-") if moves else "h0"


def hover(chart: Chart) -> str:
    """Return the values that the hover shows, as JSON that is safe inside a page."""
    kinds = {format_percent: "percent", format_duration: "seconds"}
    values = {
        "low": chart.x.low,
        "high": chart.x.high,
        "kind": kinds.get(chart.label, "number"),
        "series": [series_values(one) for one in chart.series],
    }
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def series_values(series: Series) -> dict[str, Any]:
    """Return one series' values; what a thinned curve alone has is left out elsewhere."""
    curve = series.curve
    values = {"name": series.name, "colour": series.colour, "first": rounded(curve.first, 12)}
    values["mean"] = rounded(curve.mean)
    if curve.is_thinned:
        values |= {
            "last": rounded(curve.last, 12),
            "low": rounded(curve.low),
            "high": rounded(curve.high),
        }
    return values


def rounded(values: Column, digits: int = 5) -> list[float | int | None]:
    """Return numbers with few digits; None where there is none."""
    short = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
    return [int(v) if v is not None and v.is_integer() else v for v in short]


def render(template: str, **values: Any) -> str:
    """Return the page that `template` makes of `values`; everything is escaped."""
    return templates().get_template(template).render(**values)


@cache
def templates() -> jinja2.Environment:
    """Return the environment of the templates, with the filters that they use."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("lockstep.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters.update(duration=format_duration, percent=format_percent, size=format_bytes)
    return found
