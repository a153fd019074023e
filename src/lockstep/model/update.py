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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from lockstep.comm.transfer import all_gather_bytes
from lockstep.comm.tree import nodes_of
from lockstep.data.consistency import require_same_batch
from lockstep.data.microbatch import split_evenly
from lockstep.data_parallel import gradient_norm as clipping
from lockstep.errors import GradientError, LossError, StateError, StoppedError
from lockstep.model.history import StepResult, rank_times
from lockstep.model.ledger import Page, exchange, mean_metrics, not_finite, total_loss
from lockstep.model.live_settings import LiveSettings
from lockstep.model.optimization import Optimization
from lockstep.model.parallel_context import Setting
from lockstep.model.side_effects import require_same_weights
from lockstep.model.turn import Turn

__all__ = ["Update"]


@dataclass(frozen=True)
class Update:
    """Turns the gradients of a step into new weights.

    `parameters` are those that this rank holds, `counted` those whose norm it counts:
    a parameter that stages share counts once.
    """

    setting: Setting
    parameters: Sequence[nn.Parameter]
    counted: Sequence[nn.Parameter]
    optimization: Optimization
    clip_norm: float | None

    def apply(self, step: Turn, settings: LiveSettings) -> tuple[StepResult, list[Page]]:
        """Do (1) to (6); return the result, and what each rank had to say.

        Raises LossError or GradientError, on every rank alike and before weights
        or buffers have changed, where a number is not finite.
        """
        assert step.batch is not None
        batch, group = step.batch, self.setting.group
        owned = split_evenly(batch.leaves, self.setting.replicas)
        holders = [nodes_of(each, batch.leaves) for each in owned]
        page = replace(step.page(), settings=settings.finish())
        begun = time.perf_counter()
        pages = exchange(page, step.about, group, step.attempt.previous_failure)
        exchanged = time.perf_counter()
        _judge(step, pages, settings)
        peers = pages[self.setting.position :: self.setting.stages]
        for number, (gradients, _) in enumerate(step.parts()):
            gradients.reduce(holders, [each.gradients[number] for each in peers])
        step.share_tied()
        if step.fingerprinter is not None:
            step.fingerprinter.record_reduction(page.entries)
        norm = self._clipped(step)
        if not math.isfinite(norm):
            raise GradientError(f"step {step.number}: the norm of the gradient is {norm}")
        with self._whole([each for _, buffers in step.parts() for each in buffers.tensors()]):
            for number, (_, buffers) in enumerate(step.parts()):
                findings = [each.buffers[number] for each in peers]
                buffers.merge(findings, holders, batch.leaves, self.setting.peers)
            reduced = time.perf_counter()
            rate = self.optimization.rate
            self.optimization.step(step.about)
        updated = time.perf_counter()
        step.times = exchanged, reduced, updated
        result = StepResult(
            step=step.number,
            epoch=batch.epoch,
            loss=total_loss(pages, batch.leaves),
            samples=batch.size,
            metrics=mean_metrics(pages),
            lr=rate,
            seconds=page.data + page.compute + page.idle + updated - begun,
            ranks=rank_times(pages, exchanged - begun, reduced - exchanged, updated - reduced),
            norm=norm,
        )
        return result, pages

    def _clipped(self, step: Turn) -> float:
        """Scale the gradients down to the limit, and return their norm before."""
        group = self.setting.group
        if self.optimization.sharded is not None:
            present = self.optimization.sharded.own()
            squares = clipping.squares(present)
        else:
            present = [each.grad for each in self.parameters if each.grad is not None]
            counted = [each.grad for each in self.counted if each.grad is not None]
            squares = clipping.squares(counted, self.setting.replica, self.setting.replicas)
        sums = array("d", clipping.partial(squares)).tobytes()
        messages = all_gather_bytes(sums, f"at the norm of the gradient {step.about}", group)
        norm = clipping.norm(each for message in messages for each in array("d", message))
        clipping.scale(present, norm, self.clip_norm)
        return norm

    @contextmanager
    def _whole(self, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put the buffers back where the body fails and the parameters are as before it."""
        sharded = self.optimization.sharded
        before = []
        if sharded is not None:
            sharded.versions.committed = False
            before = [each.clone() for each in buffers]
        try:
            yield
        except BaseException:
            if sharded is not None and not sharded.versions.committed:
                for tensor, kept in zip(buffers, before, strict=True):
                    tensor.copy_(kept)
            raise


def _judge(step: Turn, pages: Sequence[Page], settings: LiveSettings) -> None:
    """Raise, on every rank alike, what the ledger says of a step that cannot go on."""
    require_same_batch([page.batch for page in pages], step.number)
    if step.error is not None and not isinstance(step.error, StoppedError):
        raise step.error
    for rank, page in enumerate(pages):
        if page.stopped:
            raise StoppedError(f"rank {step.setting.rank} stopped because {page.stopped}")
        if page.failure:
            raise GradientError(f"rank {rank}, step {step.number}: {page.failure}")
        if page.side_effect:
            raise StateError(f"rank {rank}, step {step.number}: {page.side_effect}")
    if len({page.settings for page in pages}) > 1:
        settings.require_same(step.number)
    stages = step.setting.stages
    if any(len({page.weights for page in pages[n::stages]}) > 1 for n in range(stages)):
        checksums = step.side_effects.checksums()
        require_same_weights(checksums, step.about, step.setting.group)
    if (bad := not_finite(pages)) is not None:
        rank, entry = bad
        place = f"rank {rank}, step {step.number}, micro-batch {entry.leaf}"
        raise LossError(f"{place}: the loss is {entry.loss}")
