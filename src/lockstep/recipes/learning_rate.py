"""The learning rate of a training: linear warmup, then cosine decay.

lr ┤    ╭───╮
   │   ╱     ╲         warmup: (step + 1) / warmup_steps
   │  ╱       ╲        decay: (1 + cos(pi (step - warmup_steps) / (steps - warmup_steps))) / 2
 0 ┤ ╱         ╰──
   └─┬──────────┬─
     warmup     steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.errors import UsageError

__all__ = ["DECAYS", "WarmupSchedule"]

DECAYS = ("cosine", "none")


@dataclass(frozen=True)
class WarmupSchedule:
    """A linear warmup for `warmup_steps` of `steps` steps, then cosine decay or a constant rate."""

    steps: int
    warmup_steps: int
    has_decay: bool

    @classmethod
    def of(cls, epochs: int, steps: int, warmup: float, decay: str) -> WarmupSchedule | None:
        """Return the schedule, or None if the learning rate is constant.

        Args:
            epochs: The number of epochs.
            steps: The number of steps per epoch.
            warmup: The length of the warmup in epochs.
            decay: "cosine" or "none".

        Raises:
            UsageError: The warmup is longer than the training.
        """
        if warmup > epochs:
            raise UsageError(
                f"--warmup {warmup:g} is longer than the training of {epochs} epochs, so the full "
                "learning rate would never be reached"
            )
        rate = cls(epochs * steps, math.ceil(warmup * steps), decay == "cosine")
        return rate if rate.warmup_steps or rate.has_decay else None

    def at(self, step: int) -> float:
        """Return the factor of the learning rate in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.has_decay:
            return 1.0
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return (1 + math.cos(math.pi * done)) / 2

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return the scheduler for an optimizer."""
        return LambdaLR(optimizer, self.at)
