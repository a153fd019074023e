"""The kills of `lockstep chaos`: which rank, in which step, how far into it.

A plan depends on the seed and on the numbers of kills, steps and ranks alone, so that it can be
repeated. What it names are moments of the training, not times: two machines kill in the same
steps, although not at the same instruction.
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
        part: How far into that step, from 0 to 1; what happens between it and the step before
            (an evaluation, a checkpoint) counts as its beginning.
        rank: The rank; of n ranks that are left, it is the remainder modulo n.
    """

    step: int
    part: float
    rank: int


def plan_kills(kills: int, steps: int, nprocs: int, seed: int) -> list[PlannedKill]:
    """Return kills in the order of their moments, which may lie in one step.

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
