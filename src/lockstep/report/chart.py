"""Charts as plain values: which curves, which axes, which words. Nothing here draws.

Run(s) ──> Chart ──┬─> page.py     inline SVG for a page, with hover and log scale
                   └─> picture.py  one picture for a slide (SVG or PNG)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lockstep.formatting import format_duration, format_number, format_percent, is_ratio
from lockstep.record.columns import mapping
from lockstep.record.reader import Run
from lockstep.report.axes import Axis, Column, linear, logarithmic, spanning
from lockstep.report.downsampling import Thinned, thin
from lockstep.report.summary import real, reals

__all__ = ["Chart", "Series", "curves", "overlaid"]

BUCKETS = 400
METRICS = 6  # charts of metrics at most
UTMOST = 1e300  # an axis ends here: beyond it a range is no longer a number


@dataclass(frozen=True)
class Series:
    """One curve. `role` is "line" (steps, drawn with its band) or "dots" (evaluations).

    `colour` numbers the palette, so that one thing keeps its colour in every chart.
    """

    name: str
    curve: Thinned
    role: str = "line"
    colour: int = 0


@dataclass(frozen=True)
class Chart:
    """Some curves over the steps; `log` is None where a logarithm makes no sense."""

    key: str
    title: str
    series: tuple[Series, ...]
    x: Axis
    linear: Axis
    log: Axis | None
    label: Callable[[float], str]


def curves(run: Run) -> list[Chart]:
    """Return the charts of one run: loss, metrics, seconds a step."""
    charts = [
        chart("loss", "Loss", [trained("training", run, run.steps.loss), held_out(run, None)])
    ]
    for name in metric_names([run]):
        label = format_percent if is_ratio(name) else format_number
        series = [trained("training", run, metric_column(name, run)), held_out(run, name)]
        charts.append(chart(f"metric-{name}", title(name), series, label, log=False))
    seconds = [trained("a step", run, run.steps.seconds)]
    charts.append(chart("seconds", "Time of a step", seconds, format_duration))
    return [drawn for drawn in charts if drawn.series]


def overlaid(runs: list[Run], names: list[str]) -> list[Chart]:
    """Return the charts of several runs, their curves laid over one another."""
    charts = [chart("loss", "Loss", overlay(runs, names, lambda run: run.steps.loss))]
    for name in metric_names(runs):
        label = format_percent if is_ratio(name) else format_number
        series = overlay(runs, names, partial(metric_column, name))
        charts.append(chart(f"metric-{name}", title(name), series, label, log=False))
    seconds = overlay(runs, names, lambda run: run.steps.seconds)
    charts.append(chart("seconds", "Time of a step", seconds, format_duration))
    return [drawn for drawn in charts if drawn.series]


def overlay(runs: list[Run], names: list[str], column: Callable[[Run], Column]) -> list[Series]:
    """Return one column of each run as a curve in a colour of its own."""
    numbered = enumerate(zip(names, runs, strict=True))
    return [trained(name, run, column(run), colour) for colour, (name, run) in numbered]


def metric_column(name: str, run: Run) -> Column:
    """Return the steps' values of one metric; nothing where a run has none."""
    return run.steps.metrics.get(name, np.empty(0))


def chart(
    key: str,
    heading: str,
    series: Iterable[Series],
    label: Callable[[float], str] = format_number,
    *,
    log: bool = True,
) -> Chart:
    """Put series into one chart, with axes that hold them all; empty series are left out."""
    kept = tuple(one for one in series if np.isfinite(one.curve.mean).any())
    lows = np.concatenate([one.curve.low for one in kept] or [np.array([0.0])])
    highs = np.concatenate([one.curve.high for one in kept] or [np.array([1.0])])
    lows, highs = np.clip(lows, -UTMOST, UTMOST), np.clip(highs, -UTMOST, UTMOST)
    first = min((one.curve.first[0] for one in kept), default=0.0)
    last = max((one.curve.last[-1] for one in kept), default=1.0)
    low, high = float(np.nanmin(lows)), float(np.nanmax(highs))
    positive = lows[lows > 0]
    has_log = log and len(positive) > 0
    return Chart(
        key=key,
        title=heading,
        series=kept,
        x=spanning(float(first), float(last)),
        linear=linear(low, high, label),
        log=logarithmic(float(positive.min()), high, label) if has_log else None,
        label=label,
    )


def trained(name: str, run: Run, values: Column, colour: int = 0) -> Series:
    """Return a column of a run's steps as a curve; a column that is not there is empty."""
    x = places(run)
    if len(values) != len(x):
        x = values = np.empty(0)
    return Series(name, thin(x, values, BUCKETS), "line", colour)


def held_out(run: Run, metric: str | None) -> Series:
    """Return the evaluations of a run, each at the last step of its epoch."""
    ends = epoch_ends(run)
    points = []
    for line in run.epochs:
        evaluation = mapping(line.get("evaluation"))
        found = reals(evaluation.get("metrics")) | {None: real(evaluation.get("loss"))}
        point = (ends.get(real(line.get("epoch")), np.nan), found.get(metric, np.nan))
        points += [point] if np.isfinite(point).all() else []
    x, y = np.array(points, np.float64).reshape(-1, 2).T
    return Series("held out", thin(x, y, BUCKETS), "dots", 1)


def epoch_ends(run: Run) -> dict[float, float]:
    """Return the last step of each epoch that has steps."""
    epochs, x = run.steps.epoch, places(run)
    ends = np.flatnonzero(np.append(np.diff(epochs) != 0, len(epochs) > 0))
    return dict(zip(epochs[ends].tolist(), x[ends].tolist(), strict=True))


def places(run: Run) -> Column:
    """Return the steps' numbers, or their order where the record numbers them badly."""
    steps = run.steps.step
    ascends = np.isfinite(steps).all() and bool(np.all(np.diff(steps) > 0))
    return steps if ascends else np.arange(len(steps), dtype=np.float64)


def metric_names(runs: list[Run]) -> list[str]:
    """Return the names of the metrics that any of `runs` has, in order of appearance."""
    names: dict[str, Any] = {}
    for run in runs:
        names |= dict.fromkeys(run.steps.metrics)
        for line in run.epochs:
            names |= dict.fromkeys(reals(mapping(line.get("evaluation")).get("metrics")))
    return list(names)[:METRICS]


def title(name: str) -> str:
    """Return a metric's name as a heading."""
    return name[:1].upper() + name[1:].replace("_", " ")
