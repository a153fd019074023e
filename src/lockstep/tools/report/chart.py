"""Charts as plain values (axes, ticks and curves), which page.py draws.

A curve of a million steps is downsampled to a few hundred points that preserve its peaks:

    values    . . ' . . , . . | . ' . . . . ^ . | ...        n values
    buckets   [low, mean, high] [low, mean, high] ...        at most `buckets`

Each bucket keeps its minimum and maximum beside its mean, so that an outlier of one step in
a million is drawn at its full height. Non-finite values are ignored; a bucket without finite
values is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
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
from lockstep.tools.report.summary import name_weights, number_or, numbers_of

__all__ = [
    "Axis",
    "Chart",
    "SampledCurve",
    "Series",
    "Tick",
    "downsample",
    "exact_axis",
    "linear_axis",
    "log_axis",
    "run_charts",
]

MIN_RANGE = 1e-300  # smaller numbers lose digits, and their fractions become 0
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
        """Return the positions of `values` on the axis, from 0 to 1.

        Values beyond the axis are clipped to its ends. On a logarithmic axis, values that are not
        positive are NaN.
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
    if not high > low * (1 + 1e-9):  # a narrower range would have no ticks
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    marks = next(filter(lambda marks: len(marks) >= 2, _log_marks(low, high)), [low, high])
    return Axis(low, high, is_log=True).with_ticks(marks, label)


def _tick_labels(marks: Sequence[float], label: Label) -> list[str]:
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
    return (
        re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", label)
        .replace(".%", "%")
        .replace(". ", " ")
        .rstrip(".")
    )


LOSS_NAME, RATE_NAME = "loss of the batch", "rate of the first parameter group"
MAX_POINTS = 400  # points of a curve
MAX_METRICS = 6  # metrics with a chart
MAX_MARKS = 50  # marks on a chart
MAX_VALUE = 1e300  # limit of an axis: a longer range overflows


@dataclass(frozen=True)
class SampledCurve:
    """A downsampled curve; `first` and `last` are the smallest and largest x of each bucket."""

    first: Column
    last: Column
    low: Column
    mean: Column
    high: Column

    @property
    def x(self) -> Column:
        """The middle of each bucket."""
        return self.first / 2 + self.last / 2

    @property
    def is_downsampled(self) -> bool:
        """Whether a bucket holds more than one value."""
        return bool(np.any(self.first < self.last))

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.first)


@dataclass(frozen=True)
class Series:
    """One curve of a chart.

    `role` is "line" (steps, drawn with a band from minimum to maximum) or "dots"
    (evaluations). `color` is an index into the palette, so that a series has the same color
    in every chart.
    """

    name: str
    curve: SampledCurve
    role: str = "line"
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart of curves over the steps.

    `log` is the logarithmic axis, None if the chart has none. `marks` are the positions at
    which the run was resumed, on the axis of the steps. `y_name` is the name of the values; the
    labels of the ticks include the unit.
    """

    key: str
    title: str
    series: tuple[Series, ...]
    x: Axis
    linear: Axis
    log: Axis | None
    label: Callable[[float], str]
    y_name: str = ""
    marks: tuple[Tick, ...] = ()


def run_charts(run: Run) -> list[Chart]:
    """Return the charts of one run: loss, metrics, duration of a step, learning rate."""
    steps = run.steps
    losses = [_step_series("training", run, steps.loss), _evaluation_series(run, None)]
    loss = _chart("loss", "Loss", losses, y_name=LOSS_NAME)
    charts = [replace(loss, marks=_resume_marks(run, loss.x))]
    for name in _metric_names(run):
        label = format_percent if is_ratio(name) else format_number
        values = steps.metrics.get(name, np.empty(0))
        series = [_step_series("training", run, values), _evaluation_series(run, name)]
        charts.append(_chart(f"metric-{name}", _metric_title(name), series, label, log=False))
    seconds = [_step_series("per step", run, steps.seconds)]
    charts.append(_chart("seconds", "Duration of a step", seconds, format_duration, y_name="time"))
    norms = [_step_series("training", run, steps.norm)]
    charts.append(_chart("norm", "Gradient norm", norms, y_name="before clipping"))
    if _changes(steps.lr):
        rates = [_step_series("of the step", run, steps.lr)]
        charts.append(_chart("lr", "Learning rate", rates, y_name=RATE_NAME))
    return [chart for chart in (*charts, *_logged_charts(run)) if chart.series]


def _logged_charts(run: Run) -> list[Chart]:
    """Return a chart for each number that the script logged."""
    values: dict[str, dict[float, float]] = {}
    for line in run.logged:
        step, value = number_or(line.get("step")), number_or(line.get("value"))
        if math.isfinite(step) and math.isfinite(value):
            values.setdefault(line["name"], {})[step] = value
    charts = []
    for name, points in list(values.items())[:MAX_METRICS]:
        x, y = np.array(sorted(points.items()), np.float64).T
        series = Series("logged", downsample(x, y, MAX_POINTS))
        charts.append(_chart(f"log-{name}", _metric_title(name), [series], log=False, y_name=""))
    return charts


def _changes(values: Column) -> bool:
    """Return whether finite values differ from each other."""
    known = values[np.isfinite(values)]
    return bool(len(known)) and bool(known.min() < known.max())


def _resume_marks(run: Run, x: Axis) -> tuple[Tick, ...]:
    """Return the steps at which the run was resumed, without those that were repeated later."""
    steps: list[float] = []
    for line in run.resumes if _are_numbered(run) else ():
        step = number_or(line.get("step"))
        steps = [earlier for earlier in steps if earlier < step] + [step]
    steps = [step for step in steps if x.low < step <= x.high][-MAX_MARKS:]
    positions = x.positions(np.array(steps, np.float64)).tolist()
    labels = [f"resumed at step {step:,.0f}" for step in steps]
    return tuple(Tick(at, label) for at, label in zip(positions, labels, strict=True))


def _chart(
    key: str,
    heading: str,
    series: Iterable[Series],
    label: Callable[[float], str] = format_number,
    *,
    log: bool = True,
    y_name: str = "mean of the batch",
) -> Chart:
    """Return a chart of the series that are not empty, with axes that hold them all."""
    kept = tuple(one for one in series if np.isfinite(one.curve.mean).any())
    lows = np.concatenate([one.curve.low for one in kept] or [np.array([0.0])])
    highs = np.concatenate([one.curve.high for one in kept] or [np.array([1.0])])
    lows, highs = np.clip(lows, -MAX_VALUE, MAX_VALUE), np.clip(highs, -MAX_VALUE, MAX_VALUE)
    first = min((one.curve.first[0] for one in kept), default=0.0)
    last = max((one.curve.last[-1] for one in kept), default=1.0)
    low, high = float(np.nanmin(lows)), float(np.nanmax(highs))
    positive = lows[lows > 0]
    has_log = log and len(positive) > 0
    return Chart(
        key=key,
        title=heading,
        series=kept,
        x=exact_axis(float(first), float(last)),
        linear=linear_axis(low, high, label),
        log=log_axis(float(positive.min()), high, label) if has_log else None,
        label=label,
        y_name=y_name,
    )


def _step_series(name: str, run: Run, values: Column) -> Series:
    """Return a column of a run's steps as a curve; an empty column gives an empty curve."""
    x = _step_numbers(run)
    if len(values) != len(x):
        x = values = np.empty(0)
    return Series(name, downsample(x, values, MAX_POINTS))


def _evaluation_series(run: Run, metric: str | None) -> Series:
    """Return the evaluations of a run, each at the last step of its epoch."""
    ends = _epoch_ends(run)
    points = []
    for line in run.epochs:
        evaluation = as_dict(line.get("evaluation"))
        values = numbers_of(evaluation.get("metrics")) | {None: number_or(evaluation.get("loss"))}
        point = (ends.get(number_or(line.get("epoch")), np.nan), values.get(metric, np.nan))
        points += [point] if np.isfinite(point).all() else []
    x, y = np.array(points, np.float64).reshape(-1, 2).T
    return Series(f"held out{name_weights(run)}", downsample(x, y, MAX_POINTS), "dots", 1)


def _epoch_ends(run: Run) -> dict[float, float]:
    """Return the last step of each epoch that has steps."""
    epochs, x = run.steps.epoch, _step_numbers(run)
    ends = np.flatnonzero(np.append(np.diff(epochs) != 0, len(epochs) > 0))
    return dict(zip(epochs[ends].tolist(), x[ends].tolist(), strict=True))


def _step_numbers(run: Run) -> Column:
    """Return the numbers of the steps, or their positions if the numbers do not ascend."""
    steps = run.steps.step
    return steps if _are_numbered(run) else np.arange(len(steps), dtype=np.float64)


def _are_numbered(run: Run) -> bool:
    """Return whether the numbers of the steps are finite and ascend."""
    steps = run.steps.step
    return bool(np.isfinite(steps).all() and np.all(np.diff(steps) > 0))


def _metric_names(run: Run) -> list[str]:
    """Return the names of the metrics of a run, in order of appearance."""
    names: dict[str, Any] = dict.fromkeys(run.steps.metrics)
    for line in run.epochs:
        names |= dict.fromkeys(numbers_of(as_dict(line.get("evaluation")).get("metrics")))
    return list(names)[:MAX_METRICS]


def _metric_title(name: str) -> str:
    """Return the name of a metric as a title."""
    return name[:1].upper() + name[1:].replace("_", " ")


def downsample(x: Column, y: Column, buckets: int) -> SampledCurve:
    """Downsample the curve y(x) to at most `buckets` points.

    All buckets hold the same number of values, plus or minus one.

    Args:
        x: The positions, ascending.
        y: The values, as many as positions.
        buckets: The maximum number of points.
    """
    if len(x) != len(y):
        raise ValueError(f"{len(x)} positions for {len(y)} values")
    if len(x) == 0:
        return SampledCurve(x, x, y, y, y)
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
    return SampledCurve(x[starts], x[ends], low, mean, high)
