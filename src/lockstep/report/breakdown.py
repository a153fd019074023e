"""A run taken apart: time by rank, memory by rank, epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import format_duration, format_number, format_percent, is_ratio
from lockstep.record.columns import mapping
from lockstep.record.reader import Run
from lockstep.record.recorder import PARTS
from lockstep.report.summary import real, reals

__all__ = ["EPOCHS", "RANKS", "EpochTable", "RankMemory", "RankSplit"]
__all__ += ["epoch_table", "memory", "rank_splits", "shares"]

RANKS = 32  # ranks drawn at most
EPOCHS = 60  # epochs listed at most


@dataclass(frozen=True)
class RankSplit:
    """How one rank's time splits; `length` is its time as a share of the longest rank's."""

    rank: int
    seconds: float
    length: float
    shares: dict[str, float]

    @property
    def words(self) -> str:
        """The split as a phrase."""
        return ", ".join(f"{name} {format_percent(share)}" for name, share in self.shares.items())


def rank_splits(run: Run) -> list[RankSplit]:
    """Return the split of each rank's time; where they are too many, the busiest come first."""
    totals = np.nansum(run.steps.ranks, axis=0)
    longest = totals.sum(axis=1).max(initial=0.0)
    if not longest > 0:
        return []
    found = []
    for rank, row in enumerate(totals):
        whole = float(row.sum())
        parts = (row / whole if whole else row).tolist()
        split = dict(zip(PARTS, parts, strict=True))
        found.append(RankSplit(rank, whole, whole / float(longest), split))
    if len(found) > RANKS:
        found.sort(key=lambda one: -one.seconds * one.shares["compute"])
    return found


def shares(run: Run) -> dict[str, float]:
    """Return how the time of all ranks together splits; empty where nothing is known."""
    totals = np.nansum(run.steps.ranks, axis=(0, 1))
    whole = totals.sum()
    return dict(zip(PARTS, (totals / whole).tolist(), strict=True)) if whole > 0 else {}


@dataclass(frozen=True)
class RankMemory:
    """Peak resident bytes of a rank, and as a share of the highest."""

    rank: int
    octets: float
    share: float


def memory(run: Run) -> list[RankMemory]:
    """Return each rank's peak memory over the epochs."""
    peaks: dict[int, float] = {}
    for line in run.epochs:
        values = line.get("memory_bytes")
        for rank, value in enumerate(values if isinstance(values, list) else []):
            peaks[rank] = max(peaks.get(rank, 0.0), real(value, 0.0))
    highest = max(peaks.values(), default=0.0)
    found = [RankMemory(rank, peak, peak / highest) for rank, peak in peaks.items() if highest]
    return sorted(found, key=lambda one: -one.octets)[:RANKS] if len(found) > RANKS else found


@dataclass(frozen=True)
class EpochTable:
    """The epochs as rows of text; `hidden` counts those left out in the middle."""

    names: list[str]
    rows: list[list[str]]
    hidden: int


def epoch_table(run: Run) -> EpochTable:
    """Return the table of epochs; of very many, the first and the last."""
    lines = run.epochs
    if len(lines) > EPOCHS:
        lines = lines[: EPOCHS // 2] + lines[-EPOCHS // 2 :]
    metrics = list(dict.fromkeys(name for line in lines for name in reals(line.get("metrics"))))
    held_out = any(isinstance(line.get("evaluation"), dict) for line in lines)
    extra = ["held-out loss", *(f"held-out {name}" for name in metrics)] if held_out else []
    names = ["epoch", "loss", *metrics, *extra, "samples/s", "time"]
    rows = [epoch_row(line, metrics, held_out) for line in lines]
    return EpochTable(names, rows, len(run.epochs) - len(lines))


def epoch_row(line: dict[str, Any], metrics: list[str], held_out: bool) -> list[str]:
    """Return one epoch as text."""
    evaluation = mapping(line.get("evaluation"))
    seconds = real(line.get("seconds"))
    row = [f"{real(line.get('epoch')) + 1:.0f}", *quality_cells(line, metrics)]
    row += quality_cells(evaluation, metrics) if held_out else []
    speed = real(line.get("samples")) / seconds if seconds > 0 else math.nan
    return [*row, format_number(speed), format_duration(seconds)]


def quality_cells(line: dict[str, Any], metrics: list[str]) -> list[str]:
    """Return a loss and metrics as text."""
    loss, values = real(line.get("loss")), reals(line.get("metrics"))
    cells = [f"{loss:.4f}" if math.isfinite(loss) else ""]
    for name in metrics:
        value = values.get(name, math.nan)
        shown = format_percent(value) if is_ratio(name) else format_number(value)
        cells.append(shown if math.isfinite(value) else "")
    return cells
