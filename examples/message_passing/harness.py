"""Shared by the message-passing examples: start the ranks, and print a table of their values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import lockstep as ls
from lockstep.launcher.environment import read_rank_info
from lockstep.launcher.world import World

__all__ = ["init", "print_table", "run_example"]


def run_example(main: Callable[[str | None], Any]) -> None:
    """Run `main` on this rank if a launcher started it; otherwise start the ranks first.

    Args:
        main: The example. It takes the name of a backend, or None for the default.
    """
    parser = argparse.ArgumentParser(description="A message-passing example.")
    parser.add_argument(
        "-n", type=int, default=4, help="number of ranks, without a launcher (default: 4)"
    )
    parser.add_argument(
        "--backend", help="gloo, nccl, mpi, lockstep or another backend (default: by device)"
    )
    options = parser.parse_args()
    if read_rank_info(os.environ).launcher == "python":
        ls.launch(main, (options.backend,), nprocs=options.n)
    else:
        main(options.backend)


def init(backend: str | None) -> World:
    """Join the other ranks over `backend`; new tensors are then created on this rank's device."""
    world = ls.init(backend=backend)
    torch.set_default_device(world.device)
    return world


def print_table(title: str, **columns: Any) -> str:
    """Print, on rank 0, one row per rank with its value of each column.

    Returns:
        The printed text on rank 0, an empty string on the other ranks.
    """
    row = [_format(value) for value in columns.values()]
    rows: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, row)
    if dist.get_rank() != 0:
        return ""
    table = [["", *columns], *([f"rank {rank}", *row] for rank, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    text = "\n".join([title, *(f"    {_format_row(cells, widths)}" for cells in table)])
    print(text, flush=True)
    return text


def _format_row(cells: list[str], widths: list[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "   ".join(padded).rstrip()


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, torch.Tensor):
        return " ".join(f"{number:g}" for number in value.flatten().tolist())
    if isinstance(value, list):
        return " | ".join(map(_format, value))
    return str(value)
