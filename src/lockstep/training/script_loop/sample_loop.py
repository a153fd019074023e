"""The loop over the samples of this rank, in groups of micro-batches.

    for inputs, targets in batch:               the samples of one or several micro-batches
        losses = loss_function(model(inputs), targets)          one loss per sample
        batch.backward(losses)

`lockstep.training.one_pass.script_passes` computes the groups; without it, each is one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.errors import LossError, UsageError
from lockstep.kernel.step_context import ComputedMicrobatch
from lockstep.model.loss_root import run_backward
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.one_pass.grouped_passes import PassResults
from lockstep.training.one_pass.grouped_samples import GroupedSamples, SamplePass, average

__all__ = ["SampleLoop"]


class SampleLoop:
    """The loop over this rank's samples of a batch, in groups of micro-batches.

    Args:
        loop: The loop over the micro-batches.
    """

    def __init__(self, loop: MicrobatchLoop) -> None:
        self._loop = loop
        passes: Any = loop.one_pass
        self._passes: GroupedSamples | None = None if loop.is_first_of_round else passes
        self._pass: SamplePass | None = None
        self._recorded: Any = None  # the attempt at the first or last micro-batch of a trial
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

    def _iterate_group(self, passes: GroupedSamples, group: Sequence[Microbatch]) -> Iterator[Any]:
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

    def _iterate_separately(self, group: Sequence[Microbatch], trial: Any) -> Iterator[Any]:
        """Yield the data of micro-batches, one after another."""
        loop = self._loop
        for microbatch in group:
            data = loop.begin(microbatch)
            if loop.current is None:
                continue
            if trial is not None and trial.is_new:
                self._record(trial, group, microbatch)
            try:
                yield from self._request(data)
            finally:
                if self._recorded is not None:
                    self._recorded.forward.end()
                self._recorded = None
            for name, values in self._logged.items():
                loop.current.metrics[name] = average(values)
            if trial is not None:
                loop.note_in(trial)
            loop.end()

    def _record(self, trial: Any, group: Sequence[Microbatch], microbatch: Microbatch) -> None:
        """Record the pass over the first and that over the last micro-batch."""
        if microbatch is group[0]:
            trial.alone = trial.record([microbatch], restores=False)
            self._recorded = trial.alone
        elif microbatch is group[-1]:
            first = trial.alone
            trial.last = trial.record([microbatch], restores=False, first=first)
            self._recorded = trial.last
        else:
            return
        self._recorded.forward.begin()

    def _iterate_pass(self, passes: GroupedSamples, attempt: Any) -> Iterator[Any]:
        """Yield the data of several micro-batches, unless they cannot be computed together."""
        loop = self._loop
        began = passes.begin_pass(attempt)
        if not began.is_begun:
            return
        first = attempt.group[0].index
        last = attempt.group[-1].index
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
            for check in loop.step.backward_checks:
                check(loop.microbatch.index)
            self._pass.backward(losses)
        elif self._recorded is None or not losses.requires_grad:
            loop.backward(losses.mean(), final=True)
        else:
            self._record_backward(self._recorded, losses)

    def _record_backward(self, recorded: Any, losses: torch.Tensor) -> None:
        """Run backward from the losses of a micro-batch, as those of several would be run."""
        recorded.forward.end()
        cut = losses.detach().requires_grad_()
        self._loop.backward(cut.mean())
        recorded.backward.run(lambda: run_backward(losses, cut.grad, retain_graph=False))
        recorded.results = PassResults([], [], [])

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
