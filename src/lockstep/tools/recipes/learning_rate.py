"""The learning rate of a training: linear warmup, then cosine decay, steps or a constant rate.

lr ┤    ╭───╮                lr ┤    ╭─────╮
   │   ╱     ╲                  │   ╱      │
   │  ╱       ╲                 │  ╱       ╰──────╮
 0 ┤ ╱         ╰──            0 ┤ ╱               ╰──
   └─┬──────────┬─              └─┬────────┬──────┬──
     warmup     steps             warmup   step_size

    warmup    (step + 1) / warmup_steps
    cosine    (1 + cos(pi (step - warmup_steps) / (steps - warmup_steps))) / 2
    step      gamma ^ floor(step / step_size)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.kernel.errors import UsageError

__all__ = ["WarmupSchedule"]


@dataclass(frozen=True)
class WarmupSchedule:
    """A factor of the learning rate for each step.

    Attributes:
        steps: The number of steps of the training.
        warmup_steps: The number of steps with a linearly growing rate.
        decay: "cosine", "step" or "none".
        step_size: The number of steps after which the decay "step" multiplies the rate by `gamma`.
        gamma: That factor.
    """

    steps: int
    warmup_steps: int
    decay: str
    step_size: int = 1
    gamma: float = 1.0

    @classmethod
    def of(
        cls,
        epochs: int,
        steps: int,
        warmup: float,
        decay: str,
        step_size: int = 30,
        gamma: float = 0.1,
    ) -> WarmupSchedule | None:
        """Return the schedule, or None if the learning rate is constant.

        Args:
            epochs: The number of epochs.
            steps: The number of steps per epoch.
            warmup: The length of the warmup in epochs.
            decay: "cosine", "step" or "none".
            step_size: The number of epochs after which the decay "step" lowers the rate.
            gamma: The factor by which it does so.

        Raises:
            UsageError: The warmup is longer than the training.
        """
        if warmup > epochs:
            raise UsageError(
                f"--warmup {warmup:g} is longer than the training of {epochs} epochs, so the full "
                "learning rate would never be reached"
            )
        rate = cls(epochs * steps, math.ceil(warmup * steps), decay, step_size * steps, gamma)
        return rate if rate.warmup_steps or decay != "none" else None

    def at(self, step: int) -> float:
        """Return the factor of the learning rate in step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none":
            return 1.0
        if self.decay == "step":
            return self.gamma ** (step // self.step_size)
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return (1 + math.cos(math.pi * done)) / 2

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Return the scheduler for an optimizer."""
        return LambdaLR(optimizer, self.at)
