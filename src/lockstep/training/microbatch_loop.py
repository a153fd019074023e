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

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

import torch

from lockstep.data.assignment import Hosts
from lockstep.kernel.batch import Microbatch
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

__all__ = ["CollectedGradients", "ManualStep", "MicrobatchLoop"]


class CollectedGradients(GradientSums, Protocol):
    """The sums of gradients, while micro-batches are added to them."""

    @property
    def failure(self) -> str:
        """Why the gradients cannot be added; "" if they can."""

    @property
    def can_launch_early(self) -> bool:
        """Whether sums may be exchanged while the last backward pass runs."""

    def enter_group(self) -> None:
        """Discard the plans for the ranks of an earlier group."""

    def begin(self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None) -> None:
        """Start a step of `leaves` micro-batches; `announce` compares it with other ranks."""

    def skip(self, microbatch: int) -> None:
        """Leave out a micro-batch that is not computed."""

    def current(self) -> dict[str, torch.Tensor]:
        """Return the gradients in `.grad` by the names of their parameters."""

    def accumulate(self, microbatch: int) -> None:
        """Add the gradients in `.grad` as those of a micro-batch."""

    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of this rank's last backward pass."""

    def launch_remaining(self) -> None:
        """Begin to exchange the sums that are complete."""


class MicrobatchLoop:
    """The loop of one step; use it as `ManualStep` describes.

    Attributes:
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
    ) -> None:
        self.step, self._parallel = step, parallel
        self.result: StepResult | None = None
        self.root: torch.Tensor | None = None
        self.buffers, self.gradients = buffers, gradients
        self._scopes, self._roots = scopes, roots
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

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches of a batch, one after another."""
        if self._iteration is not None:
            raise UsageError("one step takes one batch: begin another step for the next batch")
        self._iteration = self._microbatches(batch)
        return self._iteration

    def _microbatches(self, batch: Any) -> Iterator[Any]:
        step, parallel, has_buffers = self.step, self._parallel, bool(self.buffers.slots)
        first, autocast = self.place, parallel.autocast()
        batch = start_batch(step, batch)
        self.gradients.begin(batch.leaves, parallel.hosts, step.require_same_batch)
        is_read = any(observer.observes_microbatches for observer in step.observers)
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
            self._scopes.begin_microbatch(step.number, index)
            data = parallel.move_to_device(microbatch.data)
            with autocast:
                yield data
            if not self._current.losses:
                raise UsageError(
                    f"{self.place}: step.backward(loss) was not called: write it instead of "
                    "loss.backward()"
                )
            if step.observers:
                step.observe_microbatch(index, self.gradients.current, self.buffers.current)
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
        record_loss(step, loss, self.place)
        for observer in step.observers:
            observer.record_graph(loss, (step.number, index))
        current.losses.append(loss.detach())
        if metrics:
            current.metrics.update(metrics)
        with self._parallel.without_autocast():
            root, gradient = self._roots.find(loss, current.share)
            watched = NOTHING
            if final and index == self._watched:
                watched = self.gradients.watch_backward(root, index)
            self.root = root
            with watched:
                run_backward(root, gradient, retain_graph)
            self.root = None

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


class ManualStep:
    """One optimizer step whose micro-batches are computed by a loop in your script.

    `Trainer.manual_step` returns it, and `Trainer.attempts` yields it. Use it in a `with`
    statement; leaving the statement finishes the step on every rank. An exception inside leaves
    weights and buffers unchanged.

    Attributes:
        was_interrupted: Whether a rank of an elastic run was lost in the step, so that it is
            repeated.
    """

    def __init__(self, opened: AbstractContextManager[MicrobatchLoop], batch: Any = None) -> None:
        self._opened, self._batch = opened, batch
        self.was_interrupted = False
        self._loop: MicrobatchLoop | None = None
        self._result: StepResult | None = None
        self._was_entered = False

    def __del__(self) -> None:
        """Warn of a step that was never taken."""
        if not self._was_entered:
            warnings.warn(
                "trainer.manual_step() was called, but its context was never entered, so no step "
                "was taken: write `with trainer.manual_step() as step:`",
                RuntimeWarning,
                stacklevel=2,
            )

    def __enter__(self) -> ManualStep:
        """Begin the step."""
        self._was_entered = True
        self._loop = self._opened.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Finish the step, or undo it after an exception."""
        loop, self._loop = self._entered(), None
        is_suppressed = self._opened.__exit__(kind, error, traceback)
        self._result = loop.result
        is_left = bool(is_suppressed) or error is None
        self.was_interrupted = is_left and loop.result is None
        return is_suppressed

    def microbatches(self, batch: Any = None) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches, one after another.

        Call `backward` for each micro-batch before requesting the next one.

        Args:
            batch: A batch from `Trainer.batches`, or a whole global batch of tensors, the same
                on every rank, which is split here. None: the batch of `Trainer.attempts(batch)`.

        Raises:
            UsageError: The step already has a batch, or its context was not entered.
        """
        given = self._batch if batch is None else batch
        return self._entered().microbatches(given)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        metrics: Mapping[str, Any] | None = None,
        retain_graph: bool = False,
        final: bool = False,
    ) -> None:
        """Run backward from the loss of the current micro-batch.

        You may call it several times for one micro-batch; the losses are added.

        Args:
            loss: A scalar, the mean over the samples of the micro-batch.
            metrics: Means over the samples of the micro-batch, for the record.
            retain_graph: As in `torch.Tensor.backward`.
            final: Whether this is the only backward of the micro-batch. If so, the backend
                "lockstep" exchanges the gradients of the last micro-batch during its backward.

        Raises:
            LossError: The loss is not a scalar that depends on a trainable parameter.
            UsageError: No micro-batch is being computed.
        """
        self._entered().backward(loss, metrics=metrics, retain_graph=retain_graph, final=final)

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self._entered().step.number

    @property
    def place(self) -> str:
        """The rank, step and micro-batch, for messages."""
        return self._entered().place

    @property
    def result(self) -> StepResult:
        """The result of the finished step, such as `result.loss`, the same on every rank.

        Raises:
            UsageError: The step has not finished yet, or was left by an exception.
        """
        if self._result is None:
            raise UsageError(
                "the step has no result yet: read step.result after the block of "
                "`with trainer.manual_step() as step:`, which finishes it on every rank"
                if self._loop is not None
                else "the step has no result: it was not entered, or an exception ended it"
            )
        return self._result

    def _entered(self) -> MicrobatchLoop:
        if self._loop is None:
            state = "has ended" if self._was_entered else "was not entered"
            self._was_entered = True  # __del__ need not warn as well
            raise UsageError(
                f"the context of trainer.manual_step() {state}: write "
                "`with trainer.manual_step() as step:` and use step inside"
            )
        return self._loop
