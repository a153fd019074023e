"""A run in a few figures: what was trained, where, how well, how fast.

Report, compare and the table of runs all say the same, because they ask here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import format_count
from lockstep.record.reader import Run
from lockstep.record.recorder import PARTS

__all__ = ["Summary", "layout_words", "slowest_rank", "slowest_step", "summarise"]

ALIKE = 0.02  # ranks whose times differ by less are called equal


@dataclass(frozen=True)
class Summary:
    """A run's figures; NaN or "" where the record does not say.

    `loss` and `metrics` are those of the last evaluation if there was one
    (`held_out`), else of the last epoch, else of the last steps. `seconds` is
    the run's, `speed` samples a second while stepping.
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


def summarise(run: Run) -> Summary:
    """Return the figures of `run`."""
    end = run.end or {}
    loss, metrics, held_out = quality(run)
    stepping = float(np.nansum(run.steps.seconds))
    samples = float(np.nansum(run.steps.samples))
    return Summary(
        name=run.name,
        state=run.state,
        message=text(end.get("message")),
        recipe=text(run.header.get("recipe")),
        layout=layout_words(run),
        epochs=len(run.epochs),
        steps=len(run.steps),
        samples=samples,
        loss=loss,
        metrics=metrics,
        held_out=held_out,
        seconds=real(end.get("seconds"), last_time(run)),
        speed=samples / stepping if stepping > 0 else math.nan,
        step_seconds=median(run.steps.seconds),
        digest=text(end.get("digest")),
        optimizer_digest=text(end.get("optimizer_digest")),
        started=text(run.header.get("started")),
    )


def quality(run: Run) -> tuple[float, dict[str, float], bool]:
    """Return a run's loss, metrics, and whether they are of held-out samples."""
    for epoch in reversed(run.epochs):
        evaluation = epoch.get("evaluation")
        if isinstance(evaluation, dict):
            return real(evaluation.get("loss")), reals(evaluation.get("metrics")), True
    if run.epochs:
        return real(run.epochs[-1].get("loss")), reals(run.epochs[-1].get("metrics")), False
    recent = slice(-20, None)
    means = {name: mean(column[recent]) for name, column in run.steps.metrics.items()}
    return mean(run.steps.loss[recent]), means, False


def layout_words(run: Run) -> str:
    """Return the layout in words: "2 replicas × 1 stage, 8 micro-batches, gloo, cpu"."""
    layout = run.layout
    parts = []
    if "replicas" in layout:
        parts.append(many(layout["replicas"], "replica"))
        if real(layout.get("stages"), 1) != 1:
            parts[0] += f" × {many(layout['stages'], 'stage')}"
    elif "world_size" in layout:
        parts.append(many(layout["world_size"], "rank"))
    if "microbatches" in layout:
        parts.append(many(layout["microbatches"], "micro-batch", "es"))
    parts += [text(layout[name]) for name in ("backend", "device") if layout.get(name)]
    return ", ".join(parts)


@dataclass(frozen=True)
class SlowRank:
    """The rank the others wait for: its working seconds a step, and how far above the mean."""

    rank: int
    seconds: float
    excess: float


def slowest_rank(run: Run) -> SlowRank | None:
    """Return the rank that works longest (compute and data), if one stands out."""
    if run.steps.ranks.shape[1] < 2:
        return None
    busy = run.steps.ranks[:, :, [PARTS.index("compute"), PARTS.index("data")]].sum(axis=2)
    means = np.array([mean(busy[:, rank]) for rank in range(busy.shape[1])])
    if not np.isfinite(means).any() or not np.nanmean(means) > 0:
        return None
    rank = int(np.nanargmax(means))
    excess = float(means[rank] / np.nanmean(means) - 1)
    return SlowRank(rank, float(means[rank]), excess) if excess > ALIKE else None


@dataclass(frozen=True)
class SlowStep:
    """The longest step: its number, seconds, how many medians that is, and what filled it."""

    step: int
    epoch: int
    seconds: float
    medians: float
    part: str
    rank: int


def slowest_step(run: Run) -> SlowStep | None:
    """Return the step that took longest, with the part that was longer than usual."""
    seconds = run.steps.seconds
    if not np.isfinite(seconds).any():
        return None
    at = int(np.nanargmax(seconds))
    usual = median(seconds)
    part, rank = cause(run, at, float(seconds[at]) - usual)
    return SlowStep(
        step=int(np.nan_to_num(run.steps.step[at])),
        epoch=int(np.nan_to_num(run.steps.epoch[at])),
        seconds=float(seconds[at]),
        medians=float(seconds[at]) / usual if usual > 0 else math.nan,
        part=part,
        rank=rank,
    )


def cause(run: Run, at: int, excess: float) -> tuple[str, int]:
    """Return the part and rank that account for most of a step's excess; ("", 0) if none does.

    Waiting is never the cause: a rank waits for what another one does.
    """
    rows = run.steps.ranks
    near = rows[max(0, at - 500) : at + 500]
    if not np.isfinite(rows[at]).any():
        return "", 0
    above = np.nan_to_num(rows[at] - np.median(np.nan_to_num(near), axis=0))
    above[:, PARTS.index("waiting")] = 0.0
    rank, part = (int(index) for index in np.unravel_index(np.argmax(above), above.shape))
    return (PARTS[part], rank) if above[rank, part] > excess / 2 else ("", 0)


def last_time(run: Run) -> float:
    """Return the time of the last line that has one."""
    times = [real(line.get("t")) for line in (*run.epochs[-1:], *run.warnings[-1:])]
    times += run.steps.t[-1:].tolist()
    known = [time for time in times if math.isfinite(time)]
    return max(known, default=math.nan)


def many(number: Any, thing: str, plural: str = "s") -> str:
    """Return a number of things: "1 stage", "8 micro-batches"."""
    value = real(number)
    return f"{format_count(value)} {thing}{'' if value == 1 else plural}"


def median(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the median of what is finite; NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the mean of what is finite; NaN of nothing."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else math.nan


def real(value: Any, otherwise: float = math.nan) -> float:
    """Return `value` if it is a number, else `otherwise`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else otherwise


def reals(value: Any) -> dict[str, float]:
    """Return a dict's numbers."""
    return {str(k): real(v) for k, v in value.items()} if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """Return `value` as text; nothing for None."""
    return "" if value is None else str(value)
