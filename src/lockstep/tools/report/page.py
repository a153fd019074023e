"""HTML pages: charts as inline SVG within one self-contained file.

A page loads no other files. Each scale of a chart is drawn here, so the page is complete without
its script, which adds the hover and the switch between linear and logarithmic scale.

    frame of a chart     text has the same size at any width:
      y labels │ svg (stretched to the width)     labels are HTML, positioned in percent,
               └ x labels                         and the width of strokes does not scale
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.formatting import format_bytes, format_duration, format_percent
from lockstep.record.columns import Column
from lockstep.tools.report.chart import Axis, Chart, Series, Tick

if TYPE_CHECKING:
    import jinja2

__all__ = ["Panel", "Stroke", "draw_panel", "render_template"]

WIDTH, HEIGHT = 4000, 1000  # range of a chart's coordinates, which the page stretches
MAX_DOTS = 60  # evaluations drawn as dots; more are drawn as a line


@dataclass(frozen=True)
class Stroke:
    """One path: its kind ("band", "line" or "dots"), the index of its color, its SVG data."""

    kind: str
    color: int
    path: str


@dataclass(frozen=True)
class Scale:
    """A chart drawn on one vertical axis."""

    name: str
    ticks: tuple[Tick, ...]
    strokes: tuple[Stroke, ...]


@dataclass(frozen=True)
class Panel:
    """A chart as the template draws it; `data` is JSON with the values for the hover."""

    key: str
    title: str
    y_name: str
    x: tuple[Tick, ...]
    scales: tuple[Scale, ...]
    legend: tuple[Series, ...]
    marks: tuple[Tick, ...]
    data: str


def draw_panel(chart: Chart) -> Panel:
    """Draw a chart on each of its scales."""
    axes = [("linear", chart.linear)] + ([("log", chart.log)] if chart.log else [])
    scales = (Scale(name, axis.ticks, _strokes(chart, axis)) for name, axis in axes)
    return Panel(
        key=chart.key,
        title=chart.title,
        y_name=chart.y_name,
        x=chart.x.ticks,
        scales=tuple(scales),
        legend=chart.series,
        marks=chart.marks,
        data=_hover_data(chart),
    )


def _strokes(chart: Chart, y: Axis) -> tuple[Stroke, ...]:
    """Return the paths of a chart, bands below lines below dots."""
    strokes = [
        stroke for one in chart.series for stroke in _series_strokes(one, chart.x, y) if stroke.path
    ]
    return tuple(sorted(strokes, key=lambda stroke: ("band", "line", "dots").index(stroke.kind)))


def _series_strokes(series: Series, x: Axis, y: Axis) -> list[Stroke]:
    """Return the paths of one series."""
    curve = series.curve
    across = x.positions(curve.x)
    middle = y.positions(curve.mean)
    if series.role == "dots":
        kind = "dots" if len(curve) <= MAX_DOTS else "line"
        drawn = _dots_path(across, middle) if kind == "dots" else _line_path(across, middle)
        return [Stroke(kind, series.color, drawn)]
    if np.isfinite(middle).sum() == 1:
        return [Stroke("dots", series.color, _dots_path(across, middle))]
    strokes = [Stroke("line", series.color, _line_path(across, middle))]
    if curve.is_downsampled:
        outline = _band_path(across, y.positions(curve.low), y.positions(curve.high))
        strokes.insert(0, Stroke("band", series.color, outline))
    return strokes


def _line_path(x: Column, y: Column) -> str:
    """Return the path through the points, interrupted at non-finite ones."""
    return "".join(
        "M{} {}".format(*points[0]) + _relative_moves(points)
        for points in _finite_runs(x, y)
        if points
    )


def _band_path(x: Column, low: Column, high: Column) -> str:
    """Return the outline of the area between two curves."""
    bottom = np.where(np.isfinite(high), np.nan_to_num(low, nan=0.0), np.nan)
    outlines = []
    for over, under in zip(_finite_runs(x, high), _finite_runs(x, bottom), strict=True):
        points = over + under[::-1]
        outlines.append("M{} {}".format(*points[0]) + _relative_moves(points) + "z")
    return "".join(outlines)


def _dots_path(x: Column, y: Column) -> str:
    """Return a path of strokes of length zero, which round caps turn into dots."""
    return "".join(f"M{at} {to}h0" for points in _finite_runs(x, y) for at, to in points)


def _finite_runs(x: Column, y: Column) -> list[list[tuple[int, int]]]:
    """Return the runs of finite points, in the coordinates of the chart."""
    finite = np.isfinite(x) & np.isfinite(y)
    across = np.rint(np.where(finite, x, 0) * WIDTH).astype(int).tolist()
    down = np.rint(HEIGHT - np.where(finite, y, 0) * HEIGHT).astype(int).tolist()
    ends = np.flatnonzero(np.diff(np.concatenate([[0], finite, [0]]))).reshape(-1, 2)
    return [list(zip(across[first:last], down[first:last], strict=True)) for first, last in ends]


def _relative_moves(points: list[tuple[int, int]]) -> str:
    """Return the points after the first as relative moves, which are shorter than absolute ones."""
    moves = [f"{x1 - x0} {y1 - y0}" for (x0, y0), (x1, y1) in pairwise(points)]
    return "l" + " ".join(moves).replace(" -", "-") if moves else "h0"


def _hover_data(chart: Chart) -> str:
    """Return the values that the hover shows, as JSON that is safe within a page."""
    kinds = {format_percent: "percent", format_duration: "seconds"}
    values = {
        "low": chart.x.low,
        "high": chart.x.high,
        "kind": kinds.get(chart.label, "number"),
        "series": [_series_data(one) for one in chart.series],
    }
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _series_data(series: Series) -> dict[str, Any]:
    """Return the values of one series; only downsampled curves have minimum and maximum."""
    curve = series.curve
    values = {"name": series.name, "color": series.color, "first": _rounded(curve.first, 12)}
    values["mean"] = _rounded(curve.mean)
    if curve.is_downsampled:
        values |= {
            "last": _rounded(curve.last, 12),
            "low": _rounded(curve.low),
            "high": _rounded(curve.high),
        }
    return values


def _rounded(values: Column, digits: int = 5) -> list[float | int | None]:
    """Return numbers rounded to `digits` significant digits; None for non-finite ones."""
    short = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
    return [int(v) if v is not None and v.is_integer() else v for v in short]


def render_template(template: str, **values: Any) -> str:
    """Render a template with `values`, which are escaped.

    The page's policy allows the browser only the script and the style that are written here, by
    their hashes: markup that passes unescaped runs nothing.
    """
    templates = _templates()
    inline = {
        name: templates.get_template(file).render()
        for name, file in (("script", "chart.js"), ("style", "style.css"))
    }
    hashes = {name: _hash_source(text) for name, text in inline.items()}
    return templates.get_template(template).render(**inline, hashes=hashes, **values)


def _hash_source(text: str) -> str:
    """Return the hash of an inline script or style, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _templates() -> jinja2.Environment:
    """Return the environment of the templates, with their filters."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lockstep.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(duration=format_duration, percent=format_percent, size=format_bytes)
    return environment
