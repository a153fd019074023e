"""The update: what every rank does after its last backward, with the same outcome.

(1) exchange   the ledger: losses, metrics, buffers' hashes, times
(2) judge      a loss that is no number stops here, before anything has changed
(3) reduce     gradients along the tree, over the ranks
(4) clip       by the whole gradient's norm, which must be a number too; each rank
               computes its part of the blocks
(5) merge      buffers
(6) step       the optimizer, the average, the schedule
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lockstep.comm.transfer import all_gather_bytes
from lockstep.comm.tree import nodes_of
from lockstep.data.microbatch import spans
from lockstep.errors import GradientError, LossError
from lockstep.train import clipping
from lockstep.train.gradients import Gradients
from lockstep.train.history import StepResult, rank_times
from lockstep.train.ledger import Page, exchange, mean_metrics, not_finite, total_loss
from lockstep.train.optimization import Optimization
from lockstep.train.setting import Setting
from lockstep.train.step import Step

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """Turns the gradients of a step into new weights."""

    setting: Setting
    parameters: Sequence[nn.Parameter]
    gradients: Gradients
    optimization: Optimization
    clip_norm: float | None

    def apply(self, step: Step) -> tuple[StepResult, list[Page]]:
        """Do (1) to (6); return the result, and what each rank had to say.

        Raises LossError or GradientError, on every rank alike and before weights
        or buffers have changed, where a number is not finite.
        """
        assert step.batch is not None
        batch, group = step.batch, self.setting.group
        owned = spans(batch.leaves, self.setting.replicas)
        holders = [nodes_of(each, batch.leaves) for each in owned]
        page = step.page()
        begun = time.perf_counter()
        pages = exchange(page, step.about, group)
        exchanged = time.perf_counter()
        _judge(step.number, pages)
        self.gradients.reduce(holders, [each.gradients for each in pages])
        norm = self._clipped(step)
        if not math.isfinite(norm):
            raise GradientError(f"step {step.number}: the norm of the gradient is {norm}")
        step.buffers.merge([each.buffers for each in pages], holders, batch.leaves, group)
        reduced = time.perf_counter()
        rate = self.optimization.rate
        self.optimization.step()
        updated = time.perf_counter()
        result = StepResult(
            step=step.number,
            epoch=batch.epoch,
            loss=total_loss(pages, batch.leaves),
            samples=batch.size,
            metrics=mean_metrics(pages),
            lr=rate,
            seconds=page.data + page.compute + updated - begun,
            ranks=rank_times(pages, exchanged - begun, reduced - exchanged, updated - reduced),
            norm=norm,
        )
        return result, pages

    def _clipped(self, step: Step) -> float:
        """Scale the gradients down to the limit, and return their norm before."""
        group = self.setting.group
        present = [each.grad for each in self.parameters if each.grad is not None]
        squares = clipping.squares(present, self.setting.replica, self.setting.replicas)
        sums = array("d", clipping.partial(squares)).tobytes()
        messages = all_gather_bytes(sums, f"at the norm of the gradient {step.about}", group)
        norm = clipping.norm(each for message in messages for each in array("d", message))
        clipping.scale(present, norm, self.clip_norm)
        return norm


def _judge(number: int, pages: Sequence[Page]) -> None:
    """Raise, on every rank alike, what the ledger says of a step that cannot go on."""
    for rank, page in enumerate(pages):
        if page.failure:
            raise GradientError(f"rank {rank}, step {number}: {page.failure}")
    if (bad := not_finite(pages)) is not None:
        rank, entry = bad
        place = f"rank {rank}, step {number}, micro-batch {entry.leaf}"
        raise LossError(f"{place}: the loss is {entry.loss}")
