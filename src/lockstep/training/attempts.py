"""The number of a trainer, which the attempts at its steps carry."""

from __future__ import annotations

import torch.distributed as dist

from lockstep.comm.collectives import all_reduce_messages
from lockstep.kernel.step_context import Attempt

__all__ = ["begin_attempts"]

_trainers = 0  # made so far, by this rank or by others of its worlds


def begin_attempts(group: dist.ProcessGroup | None) -> Attempt:
    """Number a trainer, and return the attempt before its first one; a collective call.

    The number of the trainer is the same on every rank.
    """
    global _trainers
    number = all_reduce_messages(
        _trainers, max, lambda value: str(value).encode(), int, "making a trainer", group
    )
    _trainers = number + 1
    return Attempt(number, step=0, number=-1)
