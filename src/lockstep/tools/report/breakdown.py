"""Breakdowns of a run: time and memory by rank, epochs, resumptions.

If a run was resumed in another layout, breakdowns by rank cover only the last layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import (
    format_duration,
    format_loss,
    format_metric_value,
    format_number,
    format_percent,
)
from lockstep.record.columns import OUTSIDE, TIME_CATEGORIES, Column, as_dict
from lockstep.record.reader import Run
from lockstep.tools.report.summary import (
    as_text,
    describe_layout,
    name_weights,
    number_or,
    numbers_of,
)

__all__ = ["RESUME_COLUMNS", "EpochTable", "RankMemory", "RankTime", "epoch_table"]
__all__ += ["peak_memory", "resume_table", "time_by_rank", "time_shares"]

MAX_EPOCHS = 60  # epochs that are listed


@dataclass(frozen=True)
class RankTime:
    """The time of one rank by category; `length` is its time relative to the longest one."""

    rank: int
    seconds: float
    length: float
    shares: dict[str, float]

    @property
    def description(self) -> str:
        """The shares as a phrase."""
        return ", ".join(f"{name} {format_percent(share)}" for name, share in self.shares.items())


def time_by_rank(run: Run) -> list[RankTime]:
    """Return the time of each rank by category."""
    totals = _sum_by_rank(run)
    longest = totals.sum(axis=1).max(initial=0.0)
    if not longest > 0:
        return []
    rows = []
    for rank, row in enumerate(totals):
        total = float(row.sum())
        rows.append(RankTime(rank, total, total / float(longest), _shares(row)))
    return rows


def time_shares(run: Run) -> dict[str, float]:
    """Return the fraction of all ranks' time per category."""
    return _shares(_sum_by_rank(run).sum(axis=0))


def _sum_by_rank(run: Run) -> Column:
    """Return the seconds of each rank in each of `TIME_CATEGORIES`, and in `OUTSIDE`."""
    steps = run.layout_steps
    outside = np.nansum(steps.outside, axis=0)
    return np.concatenate([np.nansum(steps.ranks, axis=0), outside[:, np.newaxis]], axis=1)


def _shares(seconds: Column) -> dict[str, float]:
    shares = seconds / (float(seconds.sum()) or 1.0)
    return dict(zip((*TIME_CATEGORIES, OUTSIDE), shares.tolist(), strict=True))


@dataclass(frozen=True)
class RankMemory:
    """The peak resident memory of a rank, in bytes and relative to the highest."""

    rank: int
    num_bytes: float
    share: float


def peak_memory(run: Run) -> list[RankMemory]:
    """Return the peak memory of each rank over the epochs."""
    peaks: dict[int, float] = {}
    for line in run.layout_epochs:
        values = line.get("memory_bytes")
        for rank, value in enumerate(values if isinstance(values, list) else []):
            peaks[rank] = max(peaks.get(rank, 0.0), number_or(value, 0.0))
    highest = max(peaks.values(), default=0.0)
    return [RankMemory(rank, peak, peak / highest) for rank, peak in peaks.items() if highest]


@dataclass(frozen=True)
class EpochTable:
    """A table of epochs as rows of text, without `num_hidden` epochs in the middle."""

    names: list[str]
    rows: list[list[str]]
    num_hidden: int


def epoch_table(run: Run) -> EpochTable:
    """Return the table of epochs; of more than 60 epochs, only the first and the last ones."""
    lines = run.epochs
    if len(lines) > MAX_EPOCHS:
        lines = lines[: MAX_EPOCHS // 2] + lines[-MAX_EPOCHS // 2 :]
    metrics = list(
        dict.fromkeys(name for line in lines for name in numbers_of(line.get("metrics")))
    )
    held_out = any(isinstance(line.get("evaluation"), dict) for line in lines)
    of = f"held-out{name_weights(run)}"
    extra = [f"{of} {name}" for name in ("loss", *metrics)] if held_out else []
    names = ["epoch", "loss", *metrics, *extra, "samples/s", "time"]
    rows = [_epoch_row(line, metrics, held_out) for line in lines]
    return EpochTable(names, rows, len(run.epochs) - len(lines))


def _epoch_row(line: dict[str, Any], metrics: list[str], held_out: bool) -> list[str]:
    evaluation = as_dict(line.get("evaluation"))
    seconds = number_or(line.get("seconds"))
    row = [f"{number_or(line.get('epoch')) + 1:.0f}", *_quality_cells(line, metrics)]
    row += _quality_cells(evaluation, metrics) if held_out else []
    speed = number_or(line.get("samples")) / seconds if seconds > 0 else math.nan
    return [*row, format_number(speed), format_duration(seconds)]


MAX_RESUMES = 40  # rows that are listed
RESUME_COLUMNS = ("from step", "time", "layout", "differences")


def resume_table(run: Run) -> list[list[str]]:
    """Return the start and the resumptions of a run as rows of text; none if it was not resumed."""
    layout: dict[str, Any] = {}
    rows: list[list[str]] = []
    for line in (run.header, *run.resumes) if run.resumes else ():
        layout = as_dict(line.get("layout")) or layout
        step = number_or(line.get("step"), math.nan if rows else 0)
        time = as_text(line.get("resumed" if rows else "started"))
        changes = line.get("differences")
        differences = "; ".join(map(str, changes)) if isinstance(changes, list) else ""
        number = f"{step:,.0f}" if math.isfinite(step) else "?"
        rows.append([number, time, describe_layout(layout), differences])
    if len(rows) > MAX_RESUMES:
        hidden = f"... {len(rows) - MAX_RESUMES} more"
        rows[1:] = [[hidden, "", "", ""], *rows[1 - MAX_RESUMES :]]
    return rows


def _quality_cells(line: dict[str, Any], metrics: list[str]) -> list[str]:
    loss = number_or(line.get("loss"))
    values = numbers_of(line.get("metrics"))
    cells = [format_loss(loss) if math.isfinite(loss) else ""]
    for name in metrics:
        value = values.get(name, math.nan)
        cells.append(format_metric_value(name, value) if math.isfinite(value) else "")
    return cells
