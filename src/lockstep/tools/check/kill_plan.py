"""The kills of `lockstep chaos`: rank, step, and position within the step.

A plan depends only on the seed and on the numbers of kills, steps and ranks, so it can be
repeated. It names positions in the training, not times: the same plan kills in the same steps on
every machine, although not at the same instruction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["PlannedKill", "plan_kills"]


@dataclass(frozen=True, order=True)
class PlannedKill:
    """One kill.

    Attributes:
        step: The step that is interrupted, from 0.
        part: The position within that step, from 0 to 1. The time since the previous step (an
            evaluation, a checkpoint) counts as the beginning of the step.
        rank: The rank; modulo n if only n ranks are left.
    """

    step: int
    part: float
    rank: int


def plan_kills(kills: int, steps: int, nprocs: int, seed: int) -> list[PlannedKill]:
    """Return kills in the order of their positions; several may be in the same step.

    Args:
        kills: The number of kills.
        steps: The number of steps of the training.
        nprocs: The number of ranks.
        seed: The random seed.
    """
    draw = random.Random(seed)
    return sorted(
        PlannedKill(draw.randrange(steps), draw.random(), draw.randrange(nprocs))
        for _ in range(kills)
    )
