"""Forward and backward of this rank's micro-batches, one after another, on a whole model.

    with trainer.manual_step() as step:
        for inputs, targets in step.microbatches(batch):
            loss = loss_function(model(inputs), targets)
            step.backward(loss)

    before micro-batch m    fresh buffers, generators seeded with (seed, step, m)
    backward                the loss scaled by the micro-batch's share
    after it                gradients become leaf m of the tree, buffers are collected

`trainer.step(batch)` runs the same loop with the trainer's own model and loss.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.data.assignment import Hosts
from lockstep.data.microbatch import Batch, Microbatch, join_batches
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.errors import UsageError
from lockstep.kernel.parts import GradientSums
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import NOTHING, ComputedMicrobatch, StepContext, StepFailure
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.autograd_engine import run_backward
from lockstep.model.forward import explain_batch_norm
from lockstep.model.loss_root import LossRoot, record_loss
from lockstep.model.loss_shares import start_batch
from lockstep.model.parallel_context import ParallelContext

__all__ = ["CollectedGradients", "MicrobatchLoop"]

ONE_BATCH = (
    "one step takes one batch: pass several to one call, as in step.microbatches(labeled, "
    "unlabeled), or begin another step for the next batch"
)


class CollectedGradients(GradientSums, Protocol):
    """The sums of gradients, while micro-batches are added to them."""

    @property
    def failure(self) -> str:
        """Why the gradients cannot be added; "" if they can."""

    @property
    def can_launch_early(self) -> bool:
        """Whether sums may be exchanged while the last backward pass runs."""

    is_observed: bool
    """Whether `hash_current` is called after each micro-batch."""

    def enter_group(self) -> None:
        """Discard the plans for the ranks of an earlier group."""

    def begin(self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None) -> None:
        """Start a step of `leaves` micro-batches; `announce` compares it with other ranks."""

    def skip(self, microbatch: int) -> None:
        """Leave out a micro-batch that is not computed."""

    def hash_current(self) -> dict[str, int]:
        """Return hashes of the micro-batch's gradients by the names of their parameters."""

    def accumulate(self, microbatch: int) -> None:
        """Add the gradients in `.grad` as those of a micro-batch."""

    def discard(self) -> None:
        """Forget a micro-batch that was computed again."""

    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of this rank's last backward pass."""

    def launch_remaining(self) -> None:
        """Begin to exchange the sums that are complete."""


class MicrobatchLoop:
    """The loop of one step; use it as `ManualStep` describes.

    Attributes:
        step: The context of the step.
        parallel: The layout, the loss and the arithmetic.
        scopes: The RNG scopes of the model.
        buffers: The buffers of the model.
        gradients: The sums of the gradients.
        roots: The roots of backward passes.
        parameters: The parameters of the model.
        result: The result of the step; None before it is committed.
        place: The rank, the step and the micro-batch, for messages.
        root: The tensor whose backward pass is running, or has failed.
    """

    def __init__(
        self,
        step: StepContext,
        parallel: ParallelContext,
        scopes: RngScopes,
        buffers: Buffers,
        gradients: CollectedGradients,
        roots: LossRoot,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self.step, self.parallel = step, parallel
        self.result: StepResult | None = None
        self.root: torch.Tensor | None = None
        self.buffers, self.gradients = buffers, gradients
        self.scopes, self.roots, self.parameters = scopes, roots, parameters
        self._given: tuple[Any, ...] = ()
        self._iteration: Iterator[Any] | None = None
        self._current: ComputedMicrobatch | None = None
        self._watched = -1  # the micro-batch in whose backward buckets are launched
        self._where = step.where
        self.place = f"{self._where}, micro-batch 0"

    @property
    def is_complete(self) -> bool:
        """Whether a batch was given, and all its micro-batches on this rank are computed."""
        return self.step.batch is not None and self._current is None

    @property
    def position(self) -> tuple[int, int] | None:
        """The index of the micro-batch that is being computed, and its stage, which is 0."""
        return (self._current.microbatch.index, 0) if self._current else None

    @property
    def microbatch(self) -> Microbatch:
        """The micro-batch that is being computed."""
        assert self._current is not None
        return self._current.microbatch

    def start(self, *batches: Any) -> Batch:
        """Set the batch of the step, of several the batch of their pairs; return this rank's part.

        A collective call, unless the same batches are set.
        """
        if not self._given:
            self._given, self._whole = batches, batches[0]
            if len(batches) > 1:
                self._whole = join_batches([self.parallel.split(batch) for batch in batches])
            return start_batch(self.step, self._whole)
        if [*map(id, batches)] != [*map(id, self._given)]:
            raise UsageError(ONE_BATCH)
        assert self.step.batch is not None
        return self.step.batch

    def own_microbatches(self) -> tuple[Microbatch, ...]:
        """Return this rank's micro-batches, also those that an observer has left out."""
        return self.parallel.split(self._whole).microbatches

    def microbatches(self, *batches: Any) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches of a batch, one after another."""
        if self._iteration is not None:
            raise UsageError(ONE_BATCH)
        self._iteration = self._microbatches(batches)
        return self._iteration

    def _microbatches(self, batches: tuple[Any, ...]) -> Iterator[Any]:
        step, parallel, has_buffers = self.step, self.parallel, bool(self.buffers.slots)
        first, autocast = self.place, parallel.autocast()
        if self._given or len(batches) > 1:
            batch = self.start(*batches)
        else:  # the usual case, without a call
            self._given, self._whole = batches, batches[0]
            batch = start_batch(step, self._whole)
        if parallel.is_interleaved:
            parallel.share.require_turns(batch.leaves, len(step.shares))
        self.gradients.begin(batch.leaves, parallel.hosts, step.require_same_batch)
        is_read = any(observer.observes_microbatches for observer in step.observers)
        self.gradients.is_observed = is_read
        if batch.microbatches and self.gradients.can_launch_early and not is_read:
            self._watched = batch.microbatches[-1].index
        for microbatch in batch.microbatches:
            index = microbatch.index
            if index not in step.shares:
                self.gradients.skip(index)
                continue
            self._current = ComputedMicrobatch(microbatch, step.shares[index])
            self.place = f"{self._where}, micro-batch {index}"
            if has_buffers:
                self.buffers.install_copies()
            for observer in step.observers:
                observer.begin_microbatch()
            self.scopes.begin_microbatch(step.number, index)
            data = parallel.move_to_device(microbatch.data)
            with autocast:
                yield data
            if not self._current.losses:
                raise UsageError(
                    f"{self.place}: step.backward(loss) was not called: write it instead of "
                    "loss.backward()"
                )
            if step.observers:
                step.observe_microbatch(index, self.gradients.hash_current, self.buffers.current)
            with step.in_phase("reduction"):
                if has_buffers:
                    self.buffers.collect(index, microbatch.size / step.samples)
                self.gradients.accumulate(index)
            step.computed.append(self._current)
            self._current, self.place = None, first
        self.gradients.launch_remaining()

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        retain_graph: bool = False,
        final: bool = False,
    ) -> None:
        """Run backward from the loss of the current micro-batch."""
        step, current = self.step, self._current
        if current is None:
            raise UsageError(
                "call step.backward(loss) inside the loop over step.microbatches(batch)"
            )
        index = current.microbatch.index
        if share is None:
            if len(self._given) > 1:
                raise UsageError(
                    f"{self.place}: the step has {len(self._given)} batches: pass the share of the "
                    "loss, such as step.backward(loss, share=len(inputs) / batch.size) for a mean "
                    "over the inputs from one of them"
                )
            share = current.share
        # The report multiplies by the micro-batch's own share.
        noted = record_loss(step, loss, self.place, share / current.share)
        current.losses.append(noted)
        for observer in step.observers:
            observer.record_graph(loss, (step.number, index))
        if metrics:
            current.metrics.update(metrics)
        with self.parallel.without_autocast():
            root, gradient = self.roots.find(loss, share)
            watched = NOTHING
            if final and index == self._watched:
                watched = self.gradients.watch_backward(root, index)
            self.root = root
            with watched:
                run_backward(root, gradient, retain_graph)
            self.root = None

    def record_mean(self, loss: torch.Tensor) -> None:
        """Show a loss of the whole batch to the observers."""
        record_loss(self.step, loss, self._where)
        for observer in self.step.observers:
            observer.record_graph(loss, (self.step.number, 0))

    def note_mean(self, loss: torch.Tensor, samples: int) -> None:
        """Note a mean over a batch of `samples` samples, to which the micro-batch contributes."""
        assert self._current is not None
        factor = self.microbatch.size / samples / self._current.share
        self._current.losses.append(loss.detach() * factor)

    def close(self, error: BaseException | None) -> None:
        """Leave the loop; add a note that names the micro-batch to its error.

        Raises:
            UsageError: Batch norm got a single sample; it replaces the error of torch.
        """
        if isinstance(self._iteration, Generator):
            self._iteration.close()  # leaves autocast, even if the user keeps the generator
        if self.gradients.failure:
            self.step.failure = StepFailure("failure", self.gradients.failure)
        if error is None or self._current is None:
            return
        is_single = self._current.microbatch.size == 1
        if is_single and (explained := explain_batch_norm(error, self.place)) is not None:
            raise explained from error
        if "micro-batch" not in str(error):
            error.add_note(f"in {self.place}")
