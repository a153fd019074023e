"""Generators of the ranks, compared if a script draws from them between two steps.

    torch.manual_seed(seed + rank)          as programs with DistributedDataParallel do
    for batch in exact.batches(...):
        strength = float(torch.rand(()))    each rank trains its micro-batches with another value

Nothing else sees this: the sums of the gradients are equal on all ranks, and those of no other
number of ranks. It is a warning, since most of what a script draws there has no effect on the
training, such as the order of samples in an evaluation of its own. Generators that differ once stay
different, so after the first steps it is enough to look at some.
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
from lockstep.training.script_loop.loop_watch import STEPS

__all__ = ["DrawsCheck"]

EVERY = 10
"""After the first steps of a process, one of so many is compared."""

GENERATORS = ("torch", "random", "numpy")


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
        # The states at the beginning of the last compared step; steps restore them.
        self._before: tuple[object, ...] = ()
        self._drawn = [""] * len(GENERATORS)
        """A hash of the state of each from which the script has drawn since then."""
        self._has_warned = False

    def begin(self, step: StepContext, batch: Any) -> None:
        """Find out whether the script has drawn since the last step that was compared."""
        self._drawn = [""] * len(GENERATORS)
        if step.parallel.replicas == 1 or self._is_inside():
            return
        if step.attempt.number >= STEPS and step.number % EVERY:
            return
        of_torch, (of_python, *of_numpy) = state_of_all(self._device)
        now = of_torch, of_python, of_numpy
        for number, (before, after) in enumerate(zip(self._before, now, strict=False)):
            if before != after:
                self._drawn[number] = xxhash.xxh3_64_hexdigest(repr(after).encode())
        self._before = now

    def status(self, step: StepContext) -> list[str]:
        """Return the hashes; "" where nothing was drawn, as on a rank that does not evaluate."""
        return self._drawn

    def merge(self, left: list[str | None], right: list[str | None]) -> list[str | None]:
        """Return the hashes of two ranges of ranks; None where they differ."""
        return [
            there if here == "" else here if there in ("", here) else None
            for here, there in zip(left, right, strict=True)
        ]

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Warn once if ranks have drawn from generators with other states."""
        merged = summary.hooks[self.name]
        names = [name for name, drawn in zip(GENERATORS, merged, strict=True) if drawn is None]
        if not names or self._has_warned:
            return
        self._has_warned = True
        if step.parallel.rank == 0:
            log(
                f"step {step.number}: random numbers of {' and '.join(names)} were drawn before "
                "the step, and differ between the ranks: if the training depends on them, so it "
                "does on the number of ranks; seed torch, numpy and random alike on every rank, "
                "without adding the rank, and draw on all ranks (the DataLoader of an evaluation "
                "on rank 0 alone draws, too)"
            )
