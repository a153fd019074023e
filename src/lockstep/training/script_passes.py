"""Several micro-batches of a script's own loop in one pass, with the bits of a pass for each.

    for inputs, targets in batch:               the samples of several micro-batches
        losses = loss_function(model(inputs), targets)          one loss per sample
        batch.backward(losses)                  the mean of each micro-batch, and their gradients

The script computes the forward pass between two requests of its loop. A trial is a few more rounds
of the loop over the same samples: one for each micro-batch, whose results count, and one or two
over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.data.microbatch import join_samples
from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import LossError, UsageError
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import ComputedMicrobatch, StepContext
from lockstep.model.loss_root import LossRoot, run_backward
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.grouped_passes import PassResults
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.one_pass import SCHEDULE, Attempt, OnePass, Trial, can_join, cut_rows
from lockstep.training.pass_plan import CannotJoin

__all__ = ["SampleLoop", "ScriptPass", "ScriptPasses", "make_script_passes"]


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
        self._opened: dict[Any, int] = {}  # the steps with a kind of micro-batches

    def _is_compared(self, step: StepContext, group: Sequence[Microbatch]) -> bool:
        """Return whether a pass that is known is compared with separate ones again.

        Audited steps are none of those in which passes are compared, since an audit watches the
        calls of the model. So those are counted that are not audited.
        """
        return SCHEDULE.is_audited(self._opened.get(self._key(group), 0))

    def count(self, group: Sequence[Microbatch]) -> None:
        """Count a step in which the micro-batches were compared, or computed together."""
        key = self._key(group)
        self._opened[key] = self._opened.get(key, 0) + 1

    def begin_trial(
        self, step: StepContext, buffers: Buffers, group: Sequence[Microbatch]
    ) -> Trial | None:
        """Return what compares separate passes with one; None if it is not due."""
        return None if step.observers else super().begin_trial(step, buffers, group)


class ScriptPass:
    """A pass whose forward and losses the script computes.

    Args:
        passes: What begins and ends passes.
        attempt: The pass.
        roots: The roots of backward passes.

    Attributes:
        data: The samples of the micro-batches; None after an error.
        size: Their number.
    """

    def __init__(self, passes: ScriptPasses, attempt: Attempt, roots: LossRoot) -> None:
        self._passes = passes
        self._attempt = attempt
        self._roots = roots
        self.size = sum(part.size for part in attempt.group)
        self.data: Any = None
        try:
            self.data = join_samples(*(part.data for part in attempt.group))
            self._state = passes.begin_forward(attempt)
            attempt.forward.begin()
        except Exception as error:
            attempt.error = error

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
        cuts = cut_rows(losses, len(attempt.group))
        results = PassResults([], [])
        for part, cut in zip(attempt.group, cuts, strict=True):
            results.losses.append(self._run_mean(cut, attempt.step.shares[part.index]))
            results.metrics.append({})
        self._passes.run_backward(attempt, [losses], [cuts])
        return results

    def _run_mean(self, losses: torch.Tensor, share: float) -> torch.Tensor:
        """Return the mean of the losses of a micro-batch, whose gradients are then known."""
        mean = losses.mean()
        root, gradient = self._roots.find(mean, share)
        run_backward(root, gradient, retain_graph=False)
        return mean.detach()

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


class SampleLoop:
    """The loop over this rank's samples of a batch, in groups of micro-batches.

    Args:
        loop: The loop over the micro-batches.
    """

    def __init__(self, loop: MicrobatchLoop) -> None:
        self._loop = loop
        passes = loop.one_pass
        can_group = isinstance(passes, ScriptPasses) and not loop.is_first_of_round
        self._passes = passes if can_group and isinstance(passes, ScriptPasses) else None
        self._pass: ScriptPass | None = None
        self._recorded: Attempt | None = None
        self._logged: dict[str, torch.Tensor] = {}
        self._has_losses = False

    def iterate(self, whole: Batch) -> Iterator[Any]:
        """Yield the data of all micro-batches, of several at once where this changes no bit."""
        loop = self._loop
        batch = loop.begin_batch((whole,))
        passes = self._passes
        if passes is None:
            yield from self._iterate_separately(batch.microbatches, None)
        else:
            for group in passes.divide(loop.step, batch):
                yield from self._iterate_group(passes, group)
        loop.close_sums()

    def _iterate_group(self, passes: ScriptPasses, group: Sequence[Microbatch]) -> Iterator[Any]:
        loop = self._loop
        attempt = passes.open(loop.step, loop.buffers, group)
        if attempt is not None:
            yield from self._iterate_pass(passes, attempt)
            results = passes.close(attempt)
            if results is not None:
                loop.end_group(group, results)
                passes.count(group)
                return
        trial = passes.begin_trial(loop.step, loop.buffers, group)
        if trial is None:
            yield from self._iterate_separately(group, None)
            return
        loop.keep_gradients()
        yield from self._iterate_separately(group, trial)
        for attempt in trial.list_passes():
            yield from self._iterate_pass(passes, attempt)
        passes.count(group)

    def _iterate_separately(
        self, group: Sequence[Microbatch], trial: Trial | None
    ) -> Iterator[Any]:
        """Yield the data of micro-batches, one after another."""
        loop = self._loop
        for microbatch in group:
            data = loop.begin(microbatch)
            if loop.current is None:
                continue
            if trial is not None and trial.is_new and trial.alone is None:
                trial.alone = self._recorded = trial.record(group[:1], restores=False)
                self._recorded.forward.begin()
            try:
                yield from self._request(data)
            finally:
                if self._recorded is not None:
                    self._recorded.forward.end()
                self._recorded = None
            for name, values in self._logged.items():
                loop.current.metrics[name] = average(values)
            if trial is not None:
                trial.note(loop.current.losses[-1], loop.parameters)
            loop.end()

    def _iterate_pass(self, passes: ScriptPasses, attempt: Attempt) -> Iterator[Any]:
        """Yield the data of several micro-batches, unless they cannot be computed together."""
        loop = self._loop
        began = ScriptPass(passes, attempt, loop.roots)
        if attempt.error is not None:
            return
        first, last = attempt.group[0].index, attempt.group[-1].index
        stand_in = Microbatch(first, began.size, began.data)
        loop.current = ComputedMicrobatch(stand_in, 0.0, [], {})
        loop.place = f"{loop.step.where}, micro-batches {first} to {last}"
        self._pass = began
        try:
            yield from self._request(began.data)
            loop.current = None
        finally:
            began.end(self._logged)
            self._pass = None

    def _request(self, data: Any) -> Iterator[Any]:
        """Yield data, for which the script has to call backward."""
        self._has_losses = False
        self._logged = {}
        yield data
        if not self._has_losses:
            raise UsageError(f"{self._loop.place}: batch.backward(losses) was not called")

    def backward(self, losses: torch.Tensor) -> None:
        """Run backward from one loss per sample.

        Raises:
            LossError: There is not one loss per sample.
            UsageError: This is the second call for the same samples.
        """
        loop = self._loop
        size = loop.microbatch.size
        if not isinstance(losses, torch.Tensor) or losses.shape != (size,):
            kind = type(losses).__name__
            shape = f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else kind
            raise LossError(
                f"{loop.place}: the loss has {shape}, and with together=True there has to be one "
                f"loss per sample, here of the shape ({size},): write "
                'batch.backward(losses) with a loss function of reduction="none"'
            )
        if self._has_losses:
            raise UsageError(f"{loop.place}: a second backward of the same samples: add the losses")
        self._has_losses = True
        if self._pass is not None:
            self._pass.backward(losses)
        elif self._recorded is None or not losses.requires_grad:
            loop.backward(losses.mean(), final=True)
        else:
            self._record_backward(self._recorded, losses)

    def _record_backward(self, recorded: Attempt, losses: torch.Tensor) -> None:
        """Run backward from the losses of a micro-batch, as those of several would be run."""
        recorded.forward.end()
        cut = losses.detach().requires_grad_()
        self._loop.backward(cut.mean())
        recorded.backward.run(lambda: run_backward(losses, cut.grad, retain_graph=False))
        recorded.results = PassResults([], [])

    def log(self, name: str, values: Any) -> None:
        """Note a value of each sample.

        Raises:
            UsageError: There is not one value per sample.
        """
        loop = self._loop
        size = loop.microbatch.size
        if not isinstance(values, torch.Tensor) or values.shape != (size,):
            raise UsageError(
                f"{loop.place}: batch.log({name!r}, ...) got no tensor of the shape ({size},): "
                "with together=True, pass one value per sample"
            )
        self._logged[name] = values  # whose mean no pass must see


def average(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over some samples, with the same bits at any address."""
    copy = values.detach().clone()
    return (copy if copy.is_floating_point() else copy.float()).mean()


def make_script_passes(
    parallel: ParallelContext,
    called: nn.Module,
    modules: Mapping[str, nn.Module],
    scopes: RngScopes,
    roots: LossRoot,
) -> ScriptPasses | None:
    """Return what computes several micro-batches together; None where this is impossible.

    The arguments are those of `ScriptPasses`.
    """
    if not can_join(parallel, modules):
        return None
    return ScriptPasses(parallel, called, modules, scopes, roots)
