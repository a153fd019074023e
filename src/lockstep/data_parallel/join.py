"""Uneven inputs: ranks without data take part in the others' steps.

torch's `Join` asks at every iteration who still has data; a rank that has none
shadows the others' exchanges until nobody has.

    rank with data      forward: (1) say so   (2) buffers   backward: (3) gradients
    rank without        main_hook: (1) hear it (2) buffers            (3) no gradients
    at the end          (4) everybody takes the model of a rank that was the last
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from lockstep.comm.transfer import all_gather_bytes
from lockstep.errors import DisagreementError

__all__ = ["DDPJoinHook", "Iteration", "last_joiner", "meet"]


@dataclass(frozen=True)
class Iteration:
    """What the ranks with data do now: `source` is the first of them, `active` their number."""

    source: int
    active: int
    averages: bool
    buffers: bool


def meet(
    group: dist.ProcessGroup | None,
    averages: bool = False,
    buffers: bool = False,
    active: bool = True,
) -> Iteration:
    """Do (1): tell all ranks what this one does in the iteration, and hear it of the others.

    Raises DisagreementError on every rank where some average and others don't.
    """
    message = json.dumps([averages, buffers] if active else None).encode()
    everyone = [
        json.loads(each)
        for each in all_gather_bytes(message, "beginning an iteration in Join", group)
    ]
    working = [rank for rank, each in enumerate(everyone) if each is not None]
    first = everyone[working[0]]
    for rank in working:
        if everyone[rank] != first:
            raise DisagreementError(
                f"rank {rank} does not average as rank {working[0]} does in this iteration: use "
                "no_sync() and train() alike on every rank"
            )
    return Iteration(working[0], len(working), *first)


class DDPJoinHook(JoinHook):
    """What torch calls where a rank has no data left."""

    def __init__(self, iterate: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._iterate, self._end = iterate, end

    def main_hook(self) -> None:
        """Take part in one iteration of the others."""
        self._iterate()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do (4)."""
        self._end(is_last_joiner)


def last_joiner(is_last: bool, group: dist.ProcessGroup | None) -> int:
    """Return the first rank that had data to the end."""
    flags = [
        json.loads(each)
        for each in all_gather_bytes(json.dumps(is_last).encode(), "leaving Join", group)
    ]
    return flags.index(True)
