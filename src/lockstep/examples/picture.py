"""What the examples share: starting, and a picture of who had what before and after."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.run.environment import place

__all__ = ["begin", "picture", "start"]


def start(example: Callable[[str | None], Any]) -> None:
    """Run an example: here, where a launcher started this rank; else on ranks of its own."""
    parser = argparse.ArgumentParser(description="An example of message passing.")
    parser.add_argument("-n", type=int, default=4, help="ranks to start when run alone")
    parser.add_argument("--backend", help="gloo, mpi, nccl or another one that is here")
    given = parser.parse_args()
    if place(os.environ).launcher == "python":
        ls.launch(example, (given.backend,), nprocs=given.n)
    else:
        example(given.backend)


def begin(backend: str | None) -> ls.World:
    """Join the world with `backend`; new tensors are made on this rank's device."""
    world = ls.init(backend=backend)
    torch.set_default_device(world.device)
    return world


def picture(title: str, **columns: Any) -> str:
    """Print, on rank 0, what every rank holds in each of `columns`; return it there."""
    row = [_text(value) for value in columns.values()]
    rows: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, row)
    if dist.get_rank() != 0:
        return ""
    table = [["", *columns], *([f"rank {rank}", *row] for rank, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [_line(cells, widths) for cells in table]
    drawn = "\n".join([title, *(f"    {line}" for line in lines)])
    print(drawn, flush=True)
    return drawn


def _line(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "   ".join(padded).rstrip()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return " ".join(f"{number:g}" for number in value.flatten().tolist())
    if isinstance(value, list):
        return " | ".join(map(_text, value))
    return str(value)
