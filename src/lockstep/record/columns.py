"""The steps of a run as columns, so that a million steps are a few arrays."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.messages import escape_control
from lockstep.record.format import TIME_CATEGORIES
from lockstep.record.rank_summary import STATISTICS

__all__ = ["Column", "Line", "Steps", "as_dict", "as_float", "concatenate_steps", "parse_steps"]

Column = npt.NDArray[np.float64]
Line = dict[str, Any]

SCALARS = ("t", "step", "epoch", "loss", "samples", "seconds", "lr", "norm")
ROWS = {"ranks": len(TIME_CATEGORIES), "spread": len(TIME_CATEGORIES)}
ROWS |= {"slowest": len(TIME_CATEGORIES) + 1}
"""The columns with several rows per step, and the width of a row."""


@dataclass(frozen=True)
class Steps:
    """The steps of a run as columns of equal length; NaN where a line has no value.

    `ranks` has the shape [steps, ranks, 4]: the seconds that a rank spent on each of
    `TIME_CATEGORIES`. Steps of more than `DETAILED_RANKS` ranks have summaries instead:

    `spread` has the shape [steps, 4, 4]: the `STATISTICS` of each category over the ranks.
    `slowest` has the shape [steps, n, 5]: the numbers of the slowest ranks, and their seconds.

    The second dimension is 0 if no step has values.
    """

    t: Column
    step: Column
    epoch: Column
    loss: Column
    samples: Column
    seconds: Column
    lr: Column
    norm: Column
    metrics: dict[str, Column]
    ranks: Column
    spread: Column
    slowest: Column

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.step)

    def since(self, first: int) -> Steps:
        """Return the steps from position `first`, without ranks that occur in none of them."""
        steps = self.select(slice(first, None))
        known = np.flatnonzero(~np.isnan(steps.ranks).all(axis=(0, 2)))
        return replace(
            steps,
            ranks=steps.ranks[:, : known[-1] + 1 if len(known) else 0],
            spread=_without_unknown(steps.spread),
            slowest=_without_unknown(steps.slowest),
        )

    def select(self, chosen: slice | npt.NDArray[np.bool_]) -> Steps:
        """Return some of the steps."""
        return Steps(
            **{name: getattr(self, name)[chosen] for name in (*SCALARS, *ROWS)},
            metrics={name: column[chosen] for name, column in self.metrics.items()},
        )


def parse_steps(steps: list[Line]) -> Steps:
    """Convert the lines of some steps to columns."""
    scalars = {name: _column(steps, name) for name in SCALARS}
    metrics = _metric_columns([line.get("metrics") for line in steps])
    width = len(TIME_CATEGORIES)
    ranks = _rank_rows([line.get("ranks") for line in steps], width)
    summaries = [line.get("rank_summary") for line in steps]
    if not any(summaries):
        spread, slowest = (np.empty((len(steps), 0, size)) for size in (width, width + 1))
    else:
        dicts = list(map(as_dict, summaries))
        rows = [
            [summary.get(name) for name in STATISTICS] if summary else None for summary in dicts
        ]
        spread = _rank_rows(rows, width)
        slowest = _rank_rows([summary.get("slowest") for summary in dicts], width + 1)
    return Steps(**scalars, metrics=metrics, ranks=ranks, spread=spread, slowest=slowest)


def _column(lines: list[Any], name: str) -> Column:
    try:
        return np.fromiter(map(itemgetter(name), lines), np.float64, len(lines))
    except (KeyError, ValueError, TypeError):  # a value is missing or not a number
        return _as_floats([line.get(name) for line in lines])


def _metric_columns(values: list[Any]) -> dict[str, Column]:
    dicts = values if all(type(value) is dict for value in values) else list(map(as_dict, values))
    names = dict.fromkeys(chain.from_iterable(dicts))
    return {escape_control(str(name)): _column(dicts, name) for name in names}


def _rank_rows(values: list[Any], width: int) -> Column:
    lists = [value if isinstance(value, list) else [] for value in values]
    shape = (len(lists), max(map(len, lists)), width)
    rows = list(chain.from_iterable(lists))
    with contextlib.suppress(ValueError, TypeError):
        if len(rows) == shape[0] * shape[1] and set(map(len, rows)) <= {width}:
            return np.fromiter(chain.from_iterable(rows), np.float64).reshape(shape)
    ragged = np.full(shape, np.nan)  # the number of ranks changed, or a step has none
    for step, rows in enumerate(lists):
        for rank, row in enumerate(rows):
            if isinstance(row, list) and len(row) == width:
                ragged[step, rank] = _as_floats(row)
    return ragged


def _as_floats(values: list[Any]) -> Column:
    return np.array([as_float(value) for value in values], np.float64)


def as_float(value: Any) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    try:
        return float(value)
    except (ValueError, TypeError):
        return math.nan


def as_dict(value: Any) -> Line:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def concatenate_steps(blocks: list[Steps]) -> Steps:
    """Concatenate blocks of steps; metrics and ranks that a block lacks are NaN in it."""
    names = dict.fromkeys(chain.from_iterable(block.metrics for block in blocks))
    unknown = [np.full(len(block), np.nan) for block in blocks]
    blocks_and_unknown = list(zip(blocks, unknown, strict=True))
    return Steps(
        **{name: _concatenate([getattr(block, name) for block in blocks]) for name in SCALARS},
        **{
            name: _concatenate_rows([getattr(block, name) for block in blocks], width)
            for name, width in ROWS.items()
        },
        metrics={
            name: _concatenate([block.metrics.get(name, nan) for block, nan in blocks_and_unknown])
            for name in names
        },
    )


def _concatenate(parts: list[Column]) -> Column:
    return np.concatenate(parts) if parts else np.empty(0)


def _concatenate_rows(parts: list[Column], width: int) -> Column:
    """Concatenate arrays of the shape [steps, rows, width]; missing rows are NaN."""
    most = max((rows.shape[1] for rows in parts), default=0)
    padding = (((0, 0), (0, most - rows.shape[1]), (0, 0)) for rows in parts)
    padded = [
        np.pad(rows, pad, constant_values=np.nan) for rows, pad in zip(parts, padding, strict=True)
    ]
    return np.concatenate(padded) if padded else np.empty((0, 0, width))


def _without_unknown(rows: Column) -> Column:
    """Return the rows, or none of them if all are NaN."""
    return rows[:, :0] if np.isnan(rows).all() else rows
