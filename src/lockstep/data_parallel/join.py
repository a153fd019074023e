"""Uneven inputs: ranks without data take part in the exchanges of the others.

In every iteration, torch's `Join` determines which ranks still have data. A rank without data
repeats the collective calls of the other ranks until no rank has any data.

    rank with data      forward:   (1) exchange_iteration   (2) buffers   backward: (3) gradients
    rank without        main_hook: (1) exchange_iteration   (2) buffers   (3) without gradients
    at the end          (4) all ranks get the model of a rank that finished last
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm.collectives import gather_unless_equal
from lockstep.kernel.errors import DisagreementError

__all__ = ["DDPJoinHook", "Iteration", "exchange_iteration", "find_last_joiner"]


@dataclass(frozen=True)
class Iteration:
    """The actions of the ranks with data in an iteration."""

    source: int
    """The first rank with data, whose buffers are broadcast."""
    active: int
    """The number of ranks with data."""
    averages: bool
    buffers: bool


def exchange_iteration(
    group: dist.ProcessGroup | None,
    averages: bool = False,
    buffers: bool = False,
    is_active: bool = True,
) -> Iteration:
    """Exchange the actions of all ranks in this iteration; return those of the ranks with data.

    Args:
        group: The ranks.
        averages: Whether this rank averages gradients.
        buffers: Whether this rank broadcasts buffers.
        is_active: Whether this rank has data; a rank without data follows the other ranks.

    Raises:
        DisagreementError: The actions of the ranks with data differ; raised on every rank.
    """
    message = json.dumps([averages, buffers] if is_active else None).encode()
    messages = gather_unless_equal(message, "beginning an iteration in Join", group)
    if not messages:
        return Iteration(0, dist.get_world_size(group), averages, buffers)
    everyone = [json.loads(message) for message in messages]
    working = [rank for rank, actions in enumerate(everyone) if actions is not None]
    first = everyone[working[0]]
    for rank in working:
        if everyone[rank] != first:
            raise DisagreementError(
                f"rank {rank} averages gradients differently from rank {working[0]} in this "
                "iteration: use no_sync() and train() in the same way on every rank"
            )
    return Iteration(working[0], len(working), *first)


class DDPJoinHook(JoinHook):
    """The hook that `Join` calls on a rank without data.

    Args:
        take_part: A function that takes part in one iteration of the other ranks.
        finish: A function that does (4); its argument says whether this rank was among the last
            with data.
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
    """Return the lowest of the ranks that had data until the end."""
    messages = gather_unless_equal(json.dumps(is_last).encode(), "leaving Join", group)
    return [json.loads(message) for message in messages].index(True) if messages else 0
