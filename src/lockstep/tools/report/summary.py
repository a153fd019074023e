"""The summary of a run in a few figures: layout, quality, duration and speed.

`lockstep report`, `compare` and `runs` all show these figures.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import format_quantity
from lockstep.launcher.run_folder import find_description
from lockstep.messages import escape_control
from lockstep.record.columns import OUTSIDE, TIME_CATEGORIES, RecordLine, as_dict
from lockstep.record.reader import Run

__all__ = ["MIN_EXCESS", "SlowestRank", "Summary", "as_text", "describe_layout"]
__all__ += ["find_longest_work", "find_slowest_rank", "last_time"]
__all__ += ["name_weights", "number_or", "numbers_of", "summarize_run"]

MIN_EXCESS = 0.02  # fraction above the mean working time from which a rank is called slow


# It has many attributes: one for each figure.
@dataclass(frozen=True)
class Summary:
    """The figures of a run; NaN or "" if the record does not have them.

    `loss` and `metrics` are those of the last evaluation if there is one (`held_out`), else
    those of the last epoch, else the means of the last 20 steps. `seconds` is the duration of
    the run, `speed` the samples per second during steps, and `step_seconds` the median
    duration of a step, both in the last layout. `resume_command` is "" if the run is done or
    running, or has no checkpoint.
    """

    name: str
    state: str
    message: str
    recipe: str
    layout: str
    epochs: int
    steps: int
    samples: float
    loss: float
    metrics: dict[str, float]
    held_out: bool
    seconds: float
    speed: float
    step_seconds: float
    digest: str
    optimizer_digest: str
    started: str
    resume_command: str


def summarize_run(run: Run) -> Summary:
    """Return the summary of a run."""
    end = run.end or {}
    loss, metrics, held_out = _final_quality(run)
    recent = run.layout_steps
    stepping = float(np.nansum(recent.seconds))
    return Summary(
        name=run.name,
        state=run.state,
        message=as_text(end.get("message")),
        recipe=as_text(run.header.get("recipe")),
        layout=describe_layout(run.layout),
        epochs=len(run.epochs),
        steps=len(run.steps),
        samples=float(np.nansum(run.steps.samples)),
        loss=loss,
        metrics=metrics,
        held_out=held_out,
        seconds=_total_seconds(run),
        speed=float(np.nansum(recent.samples)) / stepping if stepping > 0 else math.nan,
        step_seconds=_finite_median(recent.seconds),
        digest=as_text(end.get("digest")),
        optimizer_digest=as_text(end.get("optimizer_digest")),
        started=as_text(run.header.get("started")),
        resume_command=_resume_command(run),
    )


def _resume_command(run: Run) -> str:
    """Return the command that resumes a run that ended early, else ""."""
    if run.state in ("done", "running"):
        return ""
    if not any((run.folder / "checkpoints").glob("step-*")):
        return ""
    folder = escape_control(str(run.folder))
    if run.header.get("recipe"):
        return shlex.join(["lockstep", "train", "--resume", folder])
    command = ["lockstep", "run", "--resume", folder]
    launched = find_description(run.folder)
    if launched is None or launched.is_redacted:  # its command is not known
        ranks = number_or(run.layout.get("world_size"), 1)
        command[2:2] = ["-n", f"{ranks:.0f}"]
        command += ["SCRIPT"]
    return shlex.join(command)


def _total_seconds(run: Run) -> float:
    """Return the duration of a run over all of its processes, in seconds."""
    end = run.end or {}
    name = (
        "t" if run.resumes or run.rounds else "seconds"
    )  # the latter counts from the start of the process
    return number_or(end.get(name), last_time(run))


def _final_quality(run: Run) -> tuple[float, dict[str, float], bool]:
    """Return the loss, the metrics, and whether they were measured on held-out samples."""
    for epoch in reversed(run.epochs):
        evaluation = epoch.get("evaluation")
        if isinstance(evaluation, dict):
            return number_or(evaluation.get("loss")), numbers_of(evaluation.get("metrics")), True
    if run.epochs:
        return (
            number_or(run.epochs[-1].get("loss")),
            numbers_of(run.epochs[-1].get("metrics")),
            False,
        )
    recent = slice(-20, None)
    means = {name: _finite_mean(column[recent]) for name, column in run.steps.metrics.items()}
    return _finite_mean(run.steps.loss[recent]), means, False


def name_weights(run: Run) -> str:
    """Return " (EMA)" if the last evaluation is one of the averaged weights; else ""."""
    evaluations = [as_dict(epoch.get("evaluation")) for epoch in run.epochs]
    return " (EMA)" if next(filter(None, reversed(evaluations)), {}).get("ema") else ""


def describe_layout(layout: RecordLine) -> str:
    """Return a layout as a phrase: "2 replicas × 2 stages, 8 micro-batches, gloo, cpu"."""
    parts = []
    if "replicas" in layout:
        parts.append(format_quantity(number_or(layout["replicas"]), "replica"))
        if number_or(layout.get("stages"), 1) != 1:
            parts[0] += f" × {format_quantity(number_or(layout['stages']), 'stage')}"
    elif "world_size" in layout:
        parts.append(format_quantity(number_or(layout["world_size"]), "rank"))
    if "microbatches" in layout:
        parts.append(format_quantity(number_or(layout["microbatches"]), "micro-batch", "es"))
    parts += [as_text(layout[name]) for name in ("backend", "device") if layout.get(name)]
    return ", ".join(parts)


WORK = {
    "compute": "in forward and backward",
    "data": "loading data",
    OUTSIDE: "between steps: in the body of the loop, callbacks, evaluation or saving",
}
"""The categories of time in which a rank works, and does not wait for others, in words."""


@dataclass(frozen=True)
class SlowestRank:
    """The rank for which the others wait.

    Attributes:
        rank: The rank.
        seconds: Its mean working time per step, with the time since the previous one.
        excess: The fraction by which this exceeds the mean of all ranks.
        category: The category of `WORK` in which it exceeds the mean of the ranks most.
    """

    rank: int
    seconds: float
    excess: float
    category: str

    @property
    def where(self) -> str:
        """The category in words."""
        return WORK[self.category]


def find_slowest_rank(run: Run) -> SlowestRank | None:
    """Return the rank that works longest if it is clearly above the mean; None for no rank."""
    times = _average_work(run)
    means = times.sum(axis=0)
    if len(means) < 2 or not np.isfinite(means).any() or not np.nanmean(means) > 0:
        return None
    rank = int(np.nanargmax(means))
    excess = float(means[rank] / np.nanmean(means) - 1)
    above = times[:, rank] - np.nanmean(times, axis=1)
    category = list(WORK)[int(np.argmax(above))]
    slowest = SlowestRank(rank, float(means[rank]), excess, category)
    return slowest if excess > MIN_EXCESS else None


def find_longest_work(run: Run) -> float:
    """Return the mean working time per step of the rank that works longest; NaN if unknown."""
    means = _average_work(run).sum(axis=0)
    return float(max(means[np.isfinite(means)], default=math.nan))


def _average_work(run: Run) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the mean seconds per step of each rank, in the columns, in each category of `WORK`."""
    steps = run.layout_steps
    rows = []
    for category in WORK:
        columns = steps.outside
        if category in TIME_CATEGORIES:
            columns = steps.ranks[:, :, TIME_CATEGORIES.index(category)]
        rows.append([_finite_mean(columns[:, rank]) for rank in range(columns.shape[1])])
    return np.array(rows)


def last_time(run: Run) -> float:
    """Return the largest time `t` of the last lines, in seconds since the run began, or NaN."""
    lines = (*run.epochs[-1:], *run.warnings[-1:], *run.resumes[-1:], *run.rounds[-1:])
    times = [number_or(line.get("t")) for line in lines]
    times += run.steps.t[-1:].tolist()
    known = [time for time in times if math.isfinite(time)]
    return max(known, default=math.nan)


def _finite_median(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the median of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _finite_mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else math.nan


def number_or(value: Any, default: float = math.nan) -> float:
    """Return `value` if it is a number, else `default`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else default


def numbers_of(value: Any) -> dict[str, float]:
    """Return the values of a dict as numbers; empty if `value` is not a dict."""
    return {str(k): number_or(v) for k, v in value.items()} if isinstance(value, dict) else {}


def as_text(value: Any) -> str:
    """Return `value` as text; "" for None."""
    return "" if value is None else str(value)
