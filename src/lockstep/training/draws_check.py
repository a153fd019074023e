"""Generators of the ranks, compared if a script draws from them between its first steps.

    torch.manual_seed(seed + rank)          as programs with DistributedDataParallel do
    for batch in exact.batches(...):
        strength = float(torch.rand(()))    each rank trains its micro-batches with another value

Nothing else sees this: the sums of the gradients are equal on all ranks, and those of no other
number of ranks. It is a warning, since most of what a script draws there has no effect on the
training, such as the order of samples in an evaluation of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepHook
from lockstep.messages import log
from lockstep.model.generator_states import state_of_all
from lockstep.training.loop_watch import STEPS

__all__ = ["DrawsCheck"]


class DrawsCheck(StepHook):
    """The hook that warns of ranks that draw other numbers between two steps.

    Args:
        device: The device whose generators are compared, beside those of the CPU.
        is_inside: Whether the step begins within one of another handle, whose micro-batch has
            seeded the generators.
    """

    name = "draws"

    def __init__(self, device: torch.device, is_inside: Callable[[], bool]) -> None:
        self._device = device
        self._is_inside = is_inside
        self._before = ""  # the states at the beginning of the last step, which restores them
        self._drawn = ""  # a hash of the states, if the script has drawn since then
        self._has_warned = False

    def begin(self, step: StepContext, batch: Any) -> None:
        """Find out whether the script has drawn since the last step."""
        self._drawn = ""
        if step.parallel.replicas == 1 or step.attempt.number >= STEPS or self._is_inside():
            return
        now = repr(state_of_all(self._device))
        if self._before and now != self._before:
            self._drawn = xxhash.xxh3_64_hexdigest(now.encode())
        self._before = now

    def status(self, step: StepContext) -> str:
        """Return the hash; "" if nothing was drawn, as on a rank that does not evaluate."""
        return self._drawn

    def merge(self, left: str | None, right: str | None) -> str | None:
        """Return the hash of two ranges of ranks; None if they differ."""
        if left == "":
            return right
        return left if right in ("", left) else None

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Warn once if ranks have drawn from generators with other states."""
        if summary.hooks[self.name] is not None or self._has_warned:
            return
        self._has_warned = True
        if step.parallel.rank == 0:
            log(
                f"step {step.number}: random numbers were drawn before the step, and differ "
                "between the ranks: if the training depends on them, so it does on the number of "
                "ranks; seed torch, numpy and random alike on every rank, without adding the rank"
            )
