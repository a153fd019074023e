"""Uneven inputs: ranks without data take part in the exchanges of the others.

torch's `Join` finds out in every iteration which ranks still have data. A rank without
data repeats the collective calls of the others until no rank has any.

    rank with data      forward:   (1) exchange_iteration   (2) buffers   backward: (3) gradients
    rank without        main_hook: (1) exchange_iteration   (2) buffers   (3) without gradients
    at the end          (4) all ranks take the model of a rank that finished last
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm.collectives import all_gather_bytes
from lockstep.errors import DisagreementError

__all__ = ["DDPJoinHook", "Iteration", "exchange_iteration", "find_last_joiner"]


@dataclass(frozen=True)
class Iteration:
    """What the ranks with data do in an iteration."""

    source: int
    """The first rank with data, whose buffers are broadcast."""
    active: int
    """Number of ranks with data."""
    averages: bool
    buffers: bool


def exchange_iteration(
    group: dist.ProcessGroup | None,
    averages: bool = False,
    buffers: bool = False,
    is_active: bool = True,
) -> Iteration:
    """Exchange what each rank does in this iteration.

    Args:
        group: The ranks.
        averages: Whether this rank averages gradients.
        buffers: Whether this rank broadcasts buffers.
        is_active: Whether this rank has data; without, it takes part in what the others do.

    Raises:
        DisagreementError: On every rank, if the ranks with data do different things.
    """
    message = json.dumps([averages, buffers] if is_active else None).encode()
    everyone = [
        json.loads(each)
        for each in all_gather_bytes(message, "beginning an iteration in Join", group)
    ]
    working = [rank for rank, each in enumerate(everyone) if each is not None]
    first = everyone[working[0]]
    for rank in working:
        if everyone[rank] != first:
            raise DisagreementError(
                f"rank {rank} averages gradients differently from rank {working[0]} in this "
                "iteration: use no_sync() and train() in the same way on every rank"
            )
    return Iteration(working[0], len(working), *first)


class DDPJoinHook(JoinHook):
    """What `Join` calls on a rank without data.

    Args:
        take_part: Takes part in one iteration of the other ranks.
        finish: Does (4); its argument is whether this rank was among the last with data.
    """

    def __init__(self, take_part: Callable[[], None], finish: Callable[[bool], None]) -> None:
        self._take_part, self._finish = take_part, finish

    def main_hook(self) -> None:
        """Take part in one iteration of the other ranks."""
        self._take_part()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do (4)."""
        self._finish(is_last_joiner)


def find_last_joiner(is_last: bool, group: dist.ProcessGroup | None) -> int:
    """Return the first of the ranks that had data until the end."""
    flags = [
        json.loads(each)
        for each in all_gather_bytes(json.dumps(is_last).encode(), "leaving Join", group)
    ]
    return flags.index(True)
