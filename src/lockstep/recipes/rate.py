"""The learning rate over a training: it rises, then falls.

lr ┤    ╭───╮
   │   ╱     ╲         warm-up: (step + 1) / rise, a straight line
   │  ╱       ╲        cosine: (1 + cos(pi (step - rise) / (steps - rise))) / 2
 0 ┤ ╱         ╰──
   └─┬──────────┬─
     rise       steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.errors import UsageError

__all__ = ["DECAYS", "Rate"]

DECAYS = ("cosine", "none")


@dataclass(frozen=True)
class Rate:
    """Rises for `rise` of the `steps` steps; then falls as a cosine does, or stays."""

    steps: int
    rise: int
    falls: bool

    @classmethod
    def of(cls, epochs: int, steps: int, warmup: float, decay: str) -> Rate | None:
        """Return the rate over `epochs` of `steps` steps each; None where it is constant.

        `warmup` counts epochs. Raises UsageError where it is longer than the training.
        """
        if warmup > epochs:
            raise UsageError(
                f"--warmup {warmup:g} is longer than the training of {epochs} epochs: the learning "
                "rate would never be reached"
            )
        rate = cls(epochs * steps, math.ceil(warmup * steps), decay == "cosine")
        return rate if rate.rise or rate.falls else None

    def at(self, step: int) -> float:
        """Return the share of the learning rate in a step, counted from 0."""
        if step < self.rise:
            return (step + 1) / self.rise
        if not self.falls:
            return 1.0
        done = (step - self.rise) / max(1, self.steps - self.rise)
        return (1 + math.cos(math.pi * done)) / 2

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """Return torch's schedule with this rate."""
        return LambdaLR(optimizer, self.at)
