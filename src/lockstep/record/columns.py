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

__all__ = [
    "OUTSIDE",
    "TIME_CATEGORIES",
    "Column",
    "RecordLine",
    "Steps",
    "as_dict",
    "as_float",
    "concatenate_steps",
    "parse_steps",
]

Column = npt.NDArray[np.float64]
RecordLine = dict[str, Any]

TIME_CATEGORIES = ("compute", "communication", "waiting", "data")
"""The categories of a step's time, in the order of a row of `ranks`."""

OUTSIDE = "outside steps"
"""The category of the time between steps that is neither `data` nor waiting."""

SCALARS = ("t", "step", "epoch", "loss", "samples", "seconds", "lr", "norm")


@dataclass(frozen=True)
class Steps:
    """The steps of a run as columns of equal length; NaN where a line has no value.

    `ranks` has the shape [steps, ranks, 4]: the seconds that a rank spent on each of
    `TIME_CATEGORIES`. The second dimension is 0 if no step has values. `outside` has the shape
    [steps, ranks]: the seconds of `OUTSIDE` before the step; 0 where a line has none, as in
    records of earlier versions.
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
    outside: Column

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.step)

    def since(self, first: int) -> Steps:
        """Return the steps from position `first`, without ranks that occur in none of them."""
        steps = self.select(slice(first, None))
        known = np.flatnonzero(~np.isnan(steps.ranks).all(axis=(0, 2)))
        width = known[-1] + 1 if len(known) else 0
        return replace(steps, ranks=steps.ranks[:, :width], outside=steps.outside[:, :width])

    def select(self, chosen: slice | npt.NDArray[np.bool_]) -> Steps:
        """Return some of the steps."""
        return Steps(
            **{name: getattr(self, name)[chosen] for name in (*SCALARS, "ranks", "outside")},
            metrics={name: column[chosen] for name, column in self.metrics.items()},
        )


def parse_steps(steps: list[RecordLine]) -> Steps:
    """Convert the lines of some steps to columns."""
    scalars = {name: _column(steps, name) for name in SCALARS}
    metrics = _metric_columns([line.get("metrics") for line in steps])
    ranks = _rank_rows([line.get("ranks") for line in steps])
    outside = _rank_values([line.get("outside") for line in steps], ranks.shape[1])
    return Steps(**scalars, metrics=metrics, ranks=ranks, outside=outside)


def _column(lines: list[Any], name: str) -> Column:
    try:
        return np.fromiter(map(itemgetter(name), lines), np.float64, len(lines))
    except (KeyError, ValueError, TypeError):  # a value is missing or not a number
        return _as_floats([line.get(name) for line in lines])


def _metric_columns(values: list[Any]) -> dict[str, Column]:
    dicts = values if all(type(value) is dict for value in values) else list(map(as_dict, values))
    names = dict.fromkeys(chain.from_iterable(dicts))
    return {escape_control(str(name)): _column(dicts, name) for name in names}


def _rank_rows(values: list[Any]) -> Column:
    width = len(TIME_CATEGORIES)
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


def _rank_values(values: list[Any], width: int) -> Column:
    """Return one value for each rank; 0 for a rank without one."""
    columns = np.zeros((len(values), width))
    for step, row in enumerate(values):
        if isinstance(row, list) and len(row) <= width:
            columns[step, : len(row)] = np.nan_to_num(_as_floats(row), posinf=0.0, neginf=0.0)
    return columns


def _as_floats(values: list[Any]) -> Column:
    return np.array([as_float(value) for value in values], np.float64)


def as_float(value: Any) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    try:
        return float(value)
    except (ValueError, TypeError):
        return math.nan


def as_dict(value: Any) -> RecordLine:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def concatenate_steps(blocks: list[Steps]) -> Steps:
    """Concatenate blocks of steps; metrics and ranks that a block lacks are NaN in it."""
    names = dict.fromkeys(chain.from_iterable(block.metrics for block in blocks))
    unknown = [np.full(len(block), np.nan) for block in blocks]
    blocks_and_unknown = list(zip(blocks, unknown, strict=True))
    return Steps(
        **{name: _concatenate([getattr(block, name) for block in blocks]) for name in SCALARS},
        ranks=_concatenate_rows([block.ranks for block in blocks]),
        outside=_concatenate_columns([block.outside for block in blocks]),
        metrics={
            name: _concatenate([block.metrics.get(name, nan) for block, nan in blocks_and_unknown])
            for name in names
        },
    )


def _concatenate(parts: list[Column]) -> Column:
    return np.concatenate(parts) if parts else np.empty(0)


def _concatenate_rows(parts: list[Column]) -> Column:
    """Concatenate arrays of the shape [steps, ranks, 4]; missing rows are NaN."""
    most = max((rows.shape[1] for rows in parts), default=0)
    padding = (((0, 0), (0, most - rows.shape[1]), (0, 0)) for rows in parts)
    padded = [
        np.pad(rows, pad, constant_values=np.nan) for rows, pad in zip(parts, padding, strict=True)
    ]
    return np.concatenate(padded) if padded else np.empty((0, 0, len(TIME_CATEGORIES)))


def _concatenate_columns(parts: list[Column]) -> Column:
    """Concatenate arrays of the shape [steps, ranks]; missing values are 0."""
    most = max((columns.shape[1] for columns in parts), default=0)
    padded = [np.pad(columns, ((0, 0), (0, most - columns.shape[1]))) for columns in parts]
    return np.concatenate(padded) if padded else np.empty((0, 0))
