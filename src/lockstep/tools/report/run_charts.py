"""The charts of a run, and the last histogram and image of each name that its script logged.

They come from the record, which anybody may have written: an image is shown only if it is a PNG
file in base64, and a histogram only if it consists of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.formatting import (
    format_count,
    format_duration,
    format_number,
    format_percent,
    is_ratio,
)
from lockstep.record.columns import Column, as_dict
from lockstep.record.reader import Run
from lockstep.tools.report.chart import (
    Curve,
    Format,
    downsample,
    draw_chart,
    linear_axis,
    log_axis,
)
from lockstep.tools.report.picture import Picture
from lockstep.tools.report.summary import name_weights, number_or, numbers_of

__all__ = ["LoggedValue", "RunChart", "draw_run_charts", "logged_histograms", "logged_images"]

# points; a phone shows them with larger text, see style.css
WIDTH = 440
HEIGHT = 216
COLORS = ("var(--c0)", "var(--c1)")
MAX_POINTS = 400  # points of a curve
MAX_X_TICKS = 4  # steps between them; more would overlap on a phone
MAX_METRICS = 6  # metrics with a chart
MAX_VALUE = 1e300  # limit of an axis: a longer range overflows
LOG_RANGE = 100  # the ratio of losses from which their axis is logarithmic
PNG = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]+={0,2}")
MAX_SHOWN = 12  # histograms, and images


@dataclass(frozen=True)
class RunChart:
    """A chart as an SVG element, with the names of its curves."""

    key: str
    title: str
    names: list[str]
    svg: str


def draw_run_charts(run: Run) -> list[RunChart]:
    """Return the charts of a run that have values."""
    return list(_draw(run))


def _draw(run: Run) -> Iterator[RunChart]:
    steps = run.steps
    numbers = _step_numbers(run)
    yield from _chart("loss", "Loss", [_steps("training", numbers, steps.loss),
                                       _evaluations(run, None)], may_be_log=True)  # fmt: skip
    for name in _metric_names(run):
        values = steps.metrics.get(name, np.full(len(steps), np.nan))
        curves = [_steps("training", numbers, values), _evaluations(run, name)]
        label = format_percent if is_ratio(name) else format_number
        yield from _chart(f"metric-{name}", _title(name), curves, label)
    seconds = [_steps("per step", numbers, steps.seconds)]
    yield from _chart("seconds", "Duration of a step", seconds, format_duration)
    norms = [_steps("before clipping", numbers, steps.norm)]
    yield from _chart("norm", "Gradient norm", norms, may_be_log=True)
    rates = steps.lr[np.isfinite(steps.lr)]
    if len(rates) and rates.min() < rates.max():
        yield from _chart("lr", "Learning rate", [_steps("of the step", numbers, steps.lr)])
    for name, points in list(_logged_numbers(run).items())[:MAX_METRICS]:
        x, y = np.array(sorted(points.items()), np.float64).T
        yield from _chart(f"log-{name}", _title(name), [_steps("logged", x, y)])


def _chart(
    key: str,
    title: str,
    given: Sequence[Curve | None],
    label: Format = format_number,
    *,
    may_be_log: bool = False,
) -> Iterator[RunChart]:
    """Yield the chart of the curves that have values, if there are any."""
    curves = [one for one in given if one is not None and np.isfinite(one.y).any()]
    if not curves:
        return
    lows, highs = (
        np.clip(np.concatenate(parts), -MAX_VALUE, MAX_VALUE)
        for parts in ([one.low for one in curves], [one.high for one in curves])
    )
    low = float(np.nanmin(lows))
    high = float(np.nanmax(highs))
    is_log = may_be_log and 0 < low < high / LOG_RANGE
    y = log_axis(low, high, label) if is_log else linear_axis(low, high, label)
    first = float(min(one.x[0] for one in curves))
    last = float(max(one.x[-1] for one in curves))
    end = last if last > first else first + 1
    x = linear_axis(first, end, format_step, MAX_X_TICKS)
    picture = Picture(WIDTH, HEIGHT, "none", f"{title} over the steps")
    box = (0, 12, WIDTH - 20, HEIGHT)
    colors = COLORS[: len(curves)]
    draw_chart(
        picture,
        curves,
        (x, y),
        box,
        colors=colors,
        ink="currentColor",
        faint="var(--faint)",
        x_name="step",
    )
    yield RunChart(key, title, [one.name for one in curves], picture.svg())


def format_step(step: float) -> str:
    """Format the number of a step for an axis, briefly where it is round: "500", "20k", "1.5M"."""
    for least, factor, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if step >= least and step % (factor / 10) == 0:
            return f"{step / factor:g}{unit}"
    return format_count(step)


def _steps(name: str, x: Column, y: Column) -> Curve | None:
    if len(x) > MAX_POINTS:
        name += f" (mean and range of {math.ceil(len(x) / MAX_POINTS)} steps)"
    return downsample(name, x, y, MAX_POINTS) if len(x) else None


def _evaluations(run: Run, metric: str | None) -> Curve | None:
    """Return the evaluations of a run, each at the last step of its epoch."""
    epochs = run.steps.epoch
    numbers = _step_numbers(run)
    ends = np.flatnonzero(np.append(np.diff(epochs) != 0, len(epochs) > 0))
    last_steps = dict(zip(epochs[ends].tolist(), numbers[ends].tolist(), strict=True))
    points = []
    for line in run.epochs:
        evaluation = as_dict(line.get("evaluation"))
        values = numbers_of(evaluation.get("metrics")) | {None: number_or(evaluation.get("loss"))}
        point = last_steps.get(number_or(line.get("epoch")), np.nan), values.get(metric, np.nan)
        points += [point] if np.isfinite(point).all() else []
    if not points:
        return None
    x, y = np.array(points, np.float64).T
    curve = downsample(f"held out{name_weights(run)}", x, y, MAX_POINTS)
    return replace(curve, is_dotted=True)


def _step_numbers(run: Run) -> Column:
    """Return the numbers of the steps, or their positions if the numbers do not ascend."""
    steps = run.steps.step
    is_numbered = np.isfinite(steps).all() and np.all(np.diff(steps) > 0)
    return steps if is_numbered else np.arange(len(steps), dtype=np.float64)


def _logged_numbers(run: Run) -> dict[str, dict[float, float]]:
    """Return the numbers that the script logged, by name and step."""
    values: dict[str, dict[float, float]] = {}
    for line in run.logged:
        step = number_or(line.get("step"))
        value = number_or(line.get("value"))
        if math.isfinite(step) and math.isfinite(value):
            values.setdefault(line["name"], {})[step] = value
    return values


def _metric_names(run: Run) -> list[str]:
    """Return the names of the metrics of a run, in order of appearance."""
    names = dict.fromkeys(run.steps.metrics)
    for line in run.epochs:
        names |= dict.fromkeys(numbers_of(as_dict(line.get("evaluation")).get("metrics")))
    return list(names)[:MAX_METRICS]


def _title(name: str) -> str:
    """Return the name of a metric as a title."""
    return name[:1].upper() + name[1:].replace("_", " ")


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
        low = number_or(given.get("low"))
        high = number_or(given.get("high"))
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
