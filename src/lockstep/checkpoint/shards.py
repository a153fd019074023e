"""Shards of tensors in checkpoints: each rank writes its rows, and a reader joins those of all.

written by rank 0 of 2    {"weight": {"shard-0-of-2": rows 0 to 4}}
written by rank 1         {"weight": {"shard-1-of-2": rows 5 to 9}}
read                      {"weight": rows 0 to 9}
read by rank 1 of 3       {"weight": rows 4 to 7}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.kernel.errors import FileError
from lockstep.sharded_tensors import find_shard, is_sharded, local_part

__all__ = ["Rows", "find_rows", "is_shard", "join_shards", "split_shards"]

NAME = re.compile(r"shard-(\d+)-of-(\d+)")

Rows = Mapping[str, tuple[Sequence[int], slice]]
"""The shapes of sharded parameters, and the rows that this rank has, by name."""


def find_rows(name: str, read_shape: Callable[[str], Sequence[int]], wanted: Rows) -> slice | None:
    """Return the rows to read of a saved tensor, which may be a shard; None for all of it.

    Args:
        name: The name of the tensor, such as "optimizer/conv.weight/exp_avg/shard-0-of-2".
        read_shape: Returns the shape of a saved tensor.
        wanted: The rows of each parameter; those of the optimizer state of its shape are the same.
    """
    whole, _, last = name.rpartition("/")
    match = NAME.fullmatch(last)
    ranks = int(match[2]) if match else 1
    names = [f"{whole}/shard-{rank}-of-{ranks}" for rank in range(ranks)] if match else [name]
    path = (whole if match else name).partition("/")[2]
    if (entry := wanted.get(path) or wanted.get(path.rpartition("/")[0])) is None:
        return None
    counts = [[*read_shape(part), 0][0] for part in names]
    shape, rows = entry
    if [sum(counts), *read_shape(name)[1:]] != [*shape]:
        return None
    begin = sum(counts[: names.index(name)])
    return slice(max(rows.start - begin, 0), max(rows.stop - begin, 0))


def is_shard(name: str) -> bool:
    """Return whether the name of a tensor, such as "weight/shard-0-of-2", is that of a shard."""
    return NAME.fullmatch(name.rpartition("/")[2]) is not None


def split_shards(value: Any) -> Any:
    """Return a value in which this rank's parts of sharded tensors take the place of the tensors.

    A sharded tensor becomes a dict with one entry, whose name has the rank and the number of ranks.
    """
    if isinstance(value, torch.Tensor) and is_sharded(value):
        shard, shards = find_shard(value)
        rows = local_part(value).detach()
        return rows if shards == 1 else {f"shard-{shard}-of-{shards}": rows}
    if isinstance(value, dict):
        return {name: split_shards(member) for name, member in value.items()}
    return value


def join_shards(value: Any) -> Any:
    """Return a value in which the shards of all ranks are joined to tensors.

    Raises:
        FileError: A shard is missing.
    """
    if not isinstance(value, dict):
        return value
    matches = [NAME.fullmatch(name) for name in value if isinstance(name, str)]
    if not value or len(matches) < len(value) or None in matches:
        return {name: join_shards(member) for name, member in value.items()}
    ranks = int(str(next(iter(value))).rpartition("-")[2])
    names = [f"shard-{rank}-of-{ranks}" for rank in range(ranks)]
    if missing := [name for name in names if name not in value]:
        raise FileError(f"its content is invalid: {missing[0]} of a tensor is missing")
    return torch.cat([value[name] for name in names])
