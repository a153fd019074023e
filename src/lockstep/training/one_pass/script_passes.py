"""Several micro-batches of a script's own loop in one pass, with the bits of a pass for each.

    for inputs, targets in batch:               the samples of several micro-batches
        losses = loss_function(model(inputs), targets)          one loss per sample
        batch.backward(losses)                  the mean of each micro-batch, and their gradients

The script computes the forward pass between two requests of its loop. A trial is a few more rounds
of the loop over the same samples: one for each micro-batch, whose results count, and one or two
over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import join_samples
from lockstep.kernel.batch import Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import StepContext
from lockstep.model.loss_root import LossRoot
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.one_pass.call_comparison import CannotJoin
from lockstep.training.one_pass.grouped_passes import PassResults
from lockstep.training.one_pass.grouped_samples import average
from lockstep.training.one_pass.one_pass import OnePass
from lockstep.training.one_pass.pass_attempt import (
    PassAttempt,
    RecordedPass,
    cut_rows,
    find_roots,
    require_elements,
    run_from_roots,
)
from lockstep.training.one_pass.pass_trial import Trial

__all__ = ["ScriptPass", "ScriptPasses"]


# It has many methods: those of `OnePass`.
class ScriptPasses(OnePass):
    """Computes several micro-batches of a script's loop together; as `OnePass`."""

    def __init__(
        self,
        parallel: ParallelContext,
        called: nn.Module,
        modules: Mapping[str, nn.Module],
        scopes: RngScopes,
        roots: LossRoot,
    ) -> None:
        super().__init__(parallel, called, modules, {}, scopes, roots)

    @property
    def loss_modes(self) -> Sequence[bool]:
        """Only that the losses are computed by the script."""
        return [False]

    def _is_compared(self, step: StepContext, group: Sequence[Microbatch]) -> bool:
        """Return whether a pass that is known is compared with separate ones again.

        Audited steps are none of those in which passes are compared, since an audit watches the
        calls of the model. So those are counted that are not audited.
        """
        return self.known.is_due(self._kind(group))

    def count(self, group: Sequence[Microbatch]) -> None:
        """Count a step in which the micro-batches were compared, or computed together."""
        self.known.count_step(self._kind(group))

    def begin_trial(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> Trial | None:
        """Return what compares separate passes with one; None if it is not due."""
        return None if step.observers else super().begin_trial(step, buffers, group)

    def begin_pass(self, attempt: PassAttempt) -> ScriptPass:
        """Begin a pass, whose forward the script computes."""
        return ScriptPass(self, attempt, self._roots)


class ScriptPass:
    """A pass whose forward and losses the script computes.

    Args:
        passes: What begins and ends passes.
        attempt: The pass.
        roots: The roots of backward passes.

    Attributes:
        data: The samples of the micro-batches; None after an error.
        size: Their number.
        is_begun: Whether the script has to compute the pass.
    """

    def __init__(self, passes: ScriptPasses, attempt: PassAttempt, roots: LossRoot) -> None:
        self._passes = passes
        self._attempt = attempt
        self._roots = roots
        self.size = sum(part.size for part in attempt.group)
        self.data: Any = None
        try:
            self.data = join_samples(*(part.data for part in attempt.group))
            attempt.note_samples(self.data)
            self._state = passes.begin_forward(attempt)
            attempt.forward.begin()
        except Exception as error:
            attempt.error = error
        self.is_begun = attempt.error is None

    def backward(self, losses: torch.Tensor) -> None:
        """End the forward pass, and compute the gradients from one loss per sample."""
        attempt = self._attempt
        attempt.forward.end()
        try:
            attempt.results = self._compute(losses)
        except CannotJoin as error:
            attempt.error = error

    def _compute(self, losses: torch.Tensor) -> PassResults:
        attempt = self._attempt
        self._passes.end_forward(attempt, self._state)
        if not losses.requires_grad or torch.is_autocast_enabled("cpu"):
            raise CannotJoin("the losses have no gradient, or are computed in autocast")
        attempt.note_order([losses])
        if not isinstance(attempt.forward, RecordedPass):
            require_elements(losses)
        cuts = cut_rows(losses, len(attempt.group))
        results = PassResults([], [], attempt.buffers_after)
        roots = []
        for part, cut in zip(attempt.group, cuts, strict=True):
            mean = cut.mean()
            roots.append(self._roots.find(mean, attempt.step.shares[part.index]))
            results.losses.append(mean.detach())
            results.metrics.append({})
        run_from_roots(roots)
        self._passes.run_from_outputs(attempt, find_roots([losses], [cuts]))
        return results

    def end(self, logged: Mapping[str, torch.Tensor]) -> None:
        """End the pass, also after an error of the script.

        Args:
            logged: A value of each sample by name.
        """
        attempt = self._attempt
        attempt.forward.end()
        if attempt.results is None:
            return
        segments = len(attempt.group)
        for name, values in logged.items():
            for metrics, part in zip(attempt.results.metrics, values.chunk(segments), strict=True):
                metrics[name] = average(part)
