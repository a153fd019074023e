"""Steps as columns: a million of them in a few arrays, NaN where a line has no value."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.messages import escape_control
from lockstep.record.recorder import PARTS

__all__ = ["Column", "Columns", "Line", "Steps", "columns", "join", "mapping", "number"]

Column = npt.NDArray[np.float64]
Line = dict[str, Any]

SCALARS = ("t", "step", "epoch", "loss", "samples", "seconds", "lr")


@dataclass(frozen=True)
class Steps:
    """The steps of a run as columns of equal length; NaN where a line has no value.

    `ranks` has the shape [steps, ranks, 4]: seconds a rank spent on each of `PARTS`.
    """

    t: Column
    step: Column
    epoch: Column
    loss: Column
    samples: Column
    seconds: Column
    lr: Column
    metrics: dict[str, Column]
    ranks: Column

    def __len__(self) -> int:
        """Return how many steps there are."""
        return len(self.step)


@dataclass(frozen=True)
class Columns:
    """One block of steps as columns; `ranks` is [steps, ranks, 4]."""

    scalars: dict[str, Column]
    metrics: dict[str, Column]
    ranks: Column


def columns(steps: list[Line]) -> Columns:
    """Turn the lines of some steps into columns."""
    scalars = {name: column(steps, name) for name in SCALARS}
    metrics = column_dicts([line.get("metrics") for line in steps])
    return Columns(scalars, metrics, rank_rows([line.get("ranks") for line in steps]))


def column(lines: list[Any], name: str) -> Column:
    """Return one field of `lines` as numbers."""
    try:
        return np.fromiter(map(itemgetter(name), lines), np.float64, len(lines))
    except (KeyError, ValueError, TypeError):  # missing in places, or no number: one by one
        return numbers([line.get(name) for line in lines])


def column_dicts(values: list[Any]) -> dict[str, Column]:
    """Turn a list of dicts of numbers into columns by key, in order of appearance."""
    dicts = values if all(type(value) is dict for value in values) else list(map(mapping, values))
    names = dict.fromkeys(chain.from_iterable(dicts))
    return {escape_control(str(name)): column(dicts, name) for name in names}


def rank_rows(values: list[Any]) -> Column:
    """Turn the rows of some steps' ranks into [steps, ranks, 4]; NaN where there is none."""
    lists = [value if isinstance(value, list) else [] for value in values]
    shape = (len(lists), max(map(len, lists)), len(PARTS))
    rows = list(chain.from_iterable(lists))
    with contextlib.suppress(ValueError, TypeError):
        if len(rows) == shape[0] * shape[1] and set(map(len, rows)) <= {len(PARTS)}:
            return np.fromiter(chain.from_iterable(rows), np.float64).reshape(shape)
    ragged = np.full(shape, np.nan)  # ranks came or went, or some steps have none: row by row
    for step, rows in enumerate(lists):
        for rank, row in enumerate(rows):
            if isinstance(row, list) and len(row) == len(PARTS):
                ragged[step, rank] = numbers(row)
    return ragged


def numbers(values: list[Any]) -> Column:
    """Return `values` as float64; NaN for what is no number."""
    return np.array([number(value) for value in values], np.float64)


def number(value: Any) -> float:
    """Return `value` as a float; NaN if it is no number."""
    try:
        return float(value)
    except (ValueError, TypeError):
        return math.nan


def join(blocks: list[Columns]) -> Steps:
    """Put blocks of columns together."""
    names = dict.fromkeys(chain.from_iterable(block.metrics for block in blocks))
    world = max((block.ranks.shape[1] for block in blocks), default=0)
    return Steps(
        **{name: concatenated([block.scalars[name] for block in blocks]) for name in SCALARS},
        metrics={
            name: concatenated(
                [block.metrics.get(name, np.full(len(block.ranks), np.nan)) for block in blocks]
            )
            for name in names
        },
        ranks=np.concatenate([widened(block.ranks, world) for block in blocks])
        if blocks
        else np.empty((0, 0, len(PARTS))),
    )


def concatenated(parts: list[Column]) -> Column:
    """Concatenate, also nothing."""
    return np.concatenate(parts) if parts else np.empty(0)


def widened(rows: Column, world: int) -> Column:
    """Give [steps, ranks, 4] more ranks, filled with NaN."""
    return np.pad(rows, ((0, 0), (0, world - rows.shape[1]), (0, 0)), constant_values=np.nan)


def mapping(value: Any) -> Line:
    """Return `value` if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}
