"""The batches of a script's own loop: an iteration over each is one step of the optimizer.

for batch in exact.batches(dataset, batch_size=128):       all ranks together
    for inputs, targets in batch:                          this rank's micro-batches
        batch.backward(loss_function(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from lockstep.data.loader import EpochBatches
from lockstep.kernel.batch import Batch
from lockstep.kernel.errors import UsageError
from lockstep.kernel.rank_status import StatusSummary
from lockstep.model.forward import require_number
from lockstep.model.loss_root import warn_of_denominator
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.script_loop.given_weights import read_number
from lockstep.training.script_loop.loop_watch import watch_loop
from lockstep.training.script_loop.sample_loop import SampleLoop
from lockstep.training.script_loop.script_steps import ScriptSteps

__all__ = ["ExactBatch", "ExactBatches"]


class ExactBatch:
    """One batch of all ranks; iterating over it computes one step, and yields its micro-batches.

    The gradients of the whole batch are in `.grad`, on every rank, when the iteration ends. An
    iteration that is begun again is another step on the same batch.

    Attributes:
        size: The number of samples, over all ranks.
        epoch: The epoch, from 0.
        number: The number of the batch in its epoch, from 0.
        indices: The indices of its samples in the dataset, int64, for a map-style dataset; None
            for others.
        is_together: Whether several micro-batches may be yielded at once.
        is_passed: Whether the script has requested the next batch.
    """

    def __init__(self, batch: Batch, steps: ScriptSteps, is_together: bool = False) -> None:
        self.data = batch
        self.is_together = is_together
        self.size = batch.size
        self.epoch = batch.epoch
        self.number = batch.identity.position
        self.indices = batch.indices
        self._steps = steps
        self._loop: MicrobatchLoop | None = None
        self._samples: SampleLoop | None = None  # of several micro-batches at once
        self._summary: StatusSummary | None = None  # after the iteration
        self._norm = 0.0
        self._final = -1  # the micro-batch whose only backward has run
        self._is_begun = False
        self.is_passed = False

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches, one after another or several at once."""
        steps = self._steps
        if self.is_passed and not self._is_begun and steps.is_logged:
            raise UsageError(
                f"{steps.place}: batch {self.number} of epoch {self.epoch} is trained after the "
                "next one was requested, and a resumed run would lose it: train on each batch "
                "before you request the next, with checkpoint= and in elastic runs"
            )
        self._is_begun = True
        self._summary = None
        is_finished = False
        while not is_finished:
            steps.require_no_gradients()
            self._loop = steps.begin(is_repeatable=True)
            self._final = -1
            try:
                if self.is_together:
                    self._samples = SampleLoop(self._loop)
                    items = self._samples.iterate(self.data)
                else:
                    items = self._loop.microbatches(self.data)
                yield from watch_loop(self._loop.step, items)
            except GeneratorExit:
                steps.leave()
                raise
            except BaseException as error:
                steps.fail(error)
            else:
                is_finished = steps.finish()
            finally:
                self._loop = None
                self._samples = None
        assert steps.opened is not None
        assert steps.opened.prepared is not None
        _, self._summary, self._norm = steps.opened.prepared

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        weight: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        final: bool = True,
        retain_graph: bool = False,
    ) -> None:
        """Run backward from the loss of the current micro-batch, multiplied by its share.

        Args:
            loss: A scalar, the mean over the samples of the micro-batch. With `together=True`, one
                loss per sample, of which the mean over each micro-batch is taken, and no other
                argument.
            share: The factor of the loss in that of the batch, the same for any number of ranks.
                None: the micro-batch's share of the samples.
            weight: What the mean divides by instead of the samples, such as the number of tokens;
                losses and gradients are divided by the sum of all weights of the batch. Of a
                micro-batch with weight 0, loss and gradients are left out.
            scaler: The scaler of a loss in float16; `loss` is then not scaled yet.
            final: Whether this is the only backward of the micro-batch. Pass False to each call
                if there are several, whose losses are added.
            retain_graph: As in `torch.Tensor.backward`.

        Raises:
            LossError: The loss is not a scalar that depends on a trainable parameter.
            UsageError: No micro-batch is being computed, the last backward was final, or both
                `share` and `weight` are given.
        """
        loop = self._loop
        if loop is None or loop.current is None:
            self._refuse("batch.backward(loss)")
        if self._samples is not None:
            has_factor = any(value is not None for value in (share, weight, scaler))
            if has_factor or retain_graph or not final:
                raise UsageError(
                    f"{loop.place}: with together=True, batch.backward(losses) takes one loss per "
                    "sample, and no other argument"
                )
            self._samples.backward(loss)
            return
        if share is not None and weight is not None:
            raise UsageError(
                f"{loop.place}: batch.backward(loss) got share= and weight=, which both say how "
                "much a micro-batch counts: pass one of them"
            )
        index = loop.current.microbatch.index
        scaled = None
        if scaler is not None:
            if not hasattr(scaler, "scale"):
                raise UsageError(
                    f"{loop.place}: scaler= of batch.backward must be a torch.amp.GradScaler, not "
                    f"of type {type(scaler).__name__}"
                )
            self._steps.require_saved(scaler)
            loop.step.may_overflow = True
            scaled = scaler.scale(loss)  # also without weight, since the first loss begins it
        if index == self._final:
            raise UsageError(
                f"{loop.place}: a second backward of the micro-batch: add its losses and call "
                "batch.backward once, or pass final=False to each call"
            )
        if share is None and weight is None:
            size = loop.current.microbatch.size
            warn_of_denominator(loop.step, loss, size, "batch.backward(loss)")
        if share is not None:
            share = read_number(loop, "share= of batch.backward", share)
        if weight is not None:
            share = read_number(loop, "weight= of batch.backward", weight)
            self._steps.weights.given[index] = share
        if weight == 0:  # such as a mean over no tokens, which is not a number
            loop.is_skipped = True
            if final:
                self._final = index
            return
        loop.backward(loss, share=share, retain_graph=retain_graph, final=final, root=scaled)
        if final:
            self._final = index

    def log(self, name: str, value: Any, weight: float | None = None) -> None:
        """Add a value of the current micro-batch to a mean over the whole batch.

        The means of all ranks are in `metrics` after the iteration, and in the record. Values of a
        micro-batch with weight 0 are left out.

        Args:
            name: The name, such as "accuracy".
            value: A number, or a tensor with one element: a mean over the samples. With
                `together=True`, a tensor with one value per sample.
            weight: What the mean divides by instead of the samples, such as a number of tokens.
        """
        loop = self._loop
        if loop is None or loop.current is None:
            self._refuse("batch.log(name, value)")
        if self._samples is not None:
            if weight is not None:
                raise UsageError(f"{loop.place}: with together=True, batch.log takes no weight")
            self._samples.log(name, value)
            return
        for number in (value, 1 if weight is None else weight):
            require_number(
                f"{loop.place}: the value of batch.log({name!r}, ...), or its weight,", number
            )
        given = value.detach() if isinstance(value, torch.Tensor) else value
        loop.current.metrics[name] = given if weight is None else (given, weight)

    @property
    def loss(self) -> float:
        """The loss of the whole batch, the same float on every rank.

        Raises:
            UsageError: The iteration over the batch has not ended.
        """
        return self._require_summary("batch.loss").sum_losses()

    @property
    def norm(self) -> float:
        """The 2-norm of the whole gradient before the optimizer's step.

        Raises:
            UsageError: The iteration over the batch has not ended.
        """
        self._require_summary("batch.norm")
        return self._norm

    @property
    def metrics(self) -> dict[str, float]:
        """The means over the whole batch of what was logged, the same floats on every rank."""
        return {} if self._summary is None else self._summary.average_metrics()

    def _require_summary(self, name: str) -> StatusSummary:
        if self._summary is None:
            raise UsageError(f"{name} is known after the loop over the batch, on every rank")
        return self._summary

    def _refuse(self, call: str) -> NoReturn:
        raise UsageError(f"call {call} inside of the loop over the micro-batches of the batch")


class ExactBatches:
    """The batches of one epoch; `exact.batches` returns it.

    Args:
        batches: The global batches, of which each rank loads its own micro-batches.
        steps: The steps of the handle.
        is_together: Whether several micro-batches may be yielded at once.
    """

    def __init__(
        self, batches: EpochBatches, steps: ScriptSteps, is_together: bool = False
    ) -> None:
        self._batches = batches
        self._steps = steps
        self._is_together = is_together

    def __len__(self) -> int:
        """Return the number of batches, and so of steps, on any number of ranks."""
        return len(self._batches)

    def __iter__(self) -> Iterator[ExactBatch]:
        """Iterate over the remaining batches of the epoch."""
        for batch in self._batches:
            given = ExactBatch(batch, self._steps, self._is_together)
            try:
                yield given
            finally:
                # Also after `break`: the step of the last batch has been taken.
                self._steps.settle()
            given.is_passed = True
            self._steps.pass_batch()

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._batches.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch as JSON values, valid for any number of ranks."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the next iteration from a saved position."""
        self._batches.load_state_dict(state)
