"""Breakdowns of a run: time and memory by rank, epochs, resumptions.

If a run was resumed in another layout, breakdowns by rank cover only the last layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from lockstep.record.columns import as_dict
from lockstep.record.format import TIME_CATEGORIES
from lockstep.record.reader import Run
from lockstep.tools.report.rank_spread import ListedRank, list_slow_ranks, mean_times
from lockstep.tools.report.summary import (
    as_text,
    describe_layout,
    name_weights,
    number_or,
    numbers_of,
)

__all__ = ["MAX_EPOCHS", "MAX_RANKS", "RESUME_COLUMNS", "EpochTable", "RankMemory", "RankTime"]
__all__ += ["epoch_table", "peak_memory", "resume_table", "time_by_rank", "time_shares"]

MAX_RANKS = 32  # ranks that are shown
MAX_EPOCHS = 60  # epochs that are listed


@dataclass(frozen=True)
class RankTime:
    """The time of one rank by category; `length` is its time relative to the longest one.

    `rank` is -1 for the mean of all ranks, and `note` says how often a rank was the slowest: both
    only if the record has summaries of the ranks. The times are then means per step.
    """

    rank: int
    seconds: float
    length: float
    shares: dict[str, float]
    note: str = ""

    @property
    def name(self) -> str:
        """The name of the rank, or of the mean."""
        return "mean" if self.rank < 0 else f"rank {self.rank}"

    @property
    def description(self) -> str:
        """The shares as a phrase."""
        parts = [f"{name} {format_percent(share)}" for name, share in self.shares.items()]
        return ", ".join([*parts, *([self.note] if self.note else [])])


def time_by_rank(run: Run) -> list[RankTime]:
    """Return the time of each rank by category; of more than 32 ranks, the busiest comes first.

    If the record has summaries, these are the mean of the ranks, and the slowest ranks.
    """
    if times := mean_times(run):
        return _summarized_times(run, times)
    totals = np.nansum(run.layout_steps.ranks, axis=0)
    longest = totals.sum(axis=1).max(initial=0.0)
    if not longest > 0:
        return []
    rows = []
    for rank, row in enumerate(totals):
        total = float(row.sum())
        shares = (row / total if total else row).tolist()
        by_name = dict(zip(TIME_CATEGORIES, shares, strict=True))
        rows.append(RankTime(rank, total, total / float(longest), by_name))
    if len(rows) > MAX_RANKS:
        rows.sort(key=lambda one: -one.seconds * one.shares["compute"])
    return rows


def _summarized_times(run: Run, times: list[float]) -> list[RankTime]:
    slow = list_slow_ranks(run)
    rows = [
        (-1, times, ""),
        *((slow_rank.rank, slow_rank.times, _describe_listed(slow_rank)) for slow_rank in slow),
    ]
    longest = max(sum(row) for _, row, _ in rows)
    times_by_rank = []
    for rank, row, note in rows:
        total = sum(row)
        shares = dict(zip(TIME_CATEGORIES, (part / (total or 1.0) for part in row), strict=True))
        times_by_rank.append(RankTime(rank, total, total / (longest or 1.0), shares, note))
    return times_by_rank


def _describe_listed(slow_rank: ListedRank) -> str:
    return (
        f"slowest in {format_percent(slow_rank.first)} of the steps, among the slowest in "
        f"{format_percent(slow_rank.listed)}"
    )


def time_shares(run: Run) -> dict[str, float]:
    """Return the fraction of all ranks' time per category; empty if no times were recorded."""
    means = mean_times(run)
    totals = np.array(means) if means else np.nansum(run.layout_steps.ranks, axis=(0, 1))
    total = totals.sum()
    if not total > 0:
        return {}
    return dict(zip(TIME_CATEGORIES, (totals / total).tolist(), strict=True))


@dataclass(frozen=True)
class RankMemory:
    """The peak resident memory of a rank, in bytes and relative to the highest."""

    rank: int
    num_bytes: float
    share: float


def peak_memory(run: Run) -> list[RankMemory]:
    """Return the peak memory of each rank over the epochs; if they are many, of the largest."""
    peaks: dict[int, float] = {}
    for line in run.layout_epochs:
        for rank, value in _list_memory(line):
            peaks[rank] = max(peaks.get(rank, 0.0), value)
    highest = max(peaks.values(), default=0.0)
    memory = [RankMemory(rank, peak, peak / highest) for rank, peak in peaks.items() if highest]
    if len(memory) <= MAX_RANKS:
        return memory
    return sorted(memory, key=lambda one: -one.num_bytes)[:MAX_RANKS]


def _list_memory(line: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Yield the ranks of the line of an epoch, and their memory in bytes."""
    values = line.get("memory_bytes")
    for rank, value in enumerate(values if isinstance(values, list) else []):
        yield rank, number_or(value, 0.0)
    largest = as_dict(line.get("memory_summary")).get("largest")
    for pair in largest if isinstance(largest, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int):
            yield pair[0], number_or(pair[1], 0.0)


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
    loss, values = number_or(line.get("loss")), numbers_of(line.get("metrics"))
    cells = [format_loss(loss) if math.isfinite(loss) else ""]
    for name in metrics:
        value = values.get(name, math.nan)
        cells.append(format_metric_value(name, value) if math.isfinite(value) else "")
    return cells
