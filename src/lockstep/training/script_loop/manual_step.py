"""A step whose micro-batches a loop in the user's script computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.forward import require_number
from lockstep.model.loss_root import warn_of_denominator
from lockstep.training.microbatch_loop import MicrobatchLoop
from lockstep.training.script_loop.given_weights import read_number
from lockstep.training.script_loop.loop_watch import watch_loop
from lockstep.training.script_loop.whole_batch import (
    add_counts,
    backward_whole_batch,
    gather_whole_batch,
)

__all__ = ["ManualStep"]


class ManualStep:
    """One optimizer step whose micro-batches are computed by a loop in your script.

    `Trainer.manual_step` returns it, and `Trainer.attempts` yields it. Use it in a `with`
    statement; leaving the statement finishes the step on every rank. An exception inside leaves
    weights and buffers unchanged.

    Attributes:
        was_interrupted: Whether a rank of an elastic run was lost in the step, or the audit has
            found a wrong result, so that the step is repeated.
    """

    def __init__(self, opened: AbstractContextManager[MicrobatchLoop], *batches: Any) -> None:
        self._opened = opened
        self._batches = batches
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
        loop = self._entered()
        self._loop = None
        is_suppressed = self._opened.__exit__(kind, error, traceback)
        self._result = loop.result
        is_left = bool(is_suppressed) or error is None
        self.was_interrupted = is_left and loop.result is None
        return is_suppressed

    def microbatches(self, *batches: Any) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches, one after another.

        Call `backward` for each micro-batch before requesting the next one.

        Args:
            *batches: A batch from `Trainer.batches`, or a whole global batch of tensors, the same
                on every rank, which is split here. Of several batches, micro-batch m is the tuple
                of their micro-batches m. None: the batches of `Trainer.attempts`.

        Raises:
            UsageError: The step already has a batch, its context was not entered, or several
                batches have different numbers of micro-batches.
        """
        loop = self._entered()
        return _continue_alike(loop, loop.microbatches(*(batches or self._batches)))

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        retain_graph: bool = False,
        final: bool = False,
    ) -> None:
        """Run backward from the loss of the current micro-batch.

        You may call it several times for one micro-batch; the losses are added.

        Args:
            loss: A scalar, the mean over the samples of the micro-batch.
            share: The factor of the loss in the loss of the batch. None: the micro-batch's share
                of the samples, or of the weights. 1 for a loss that is already divided by a
                number of the whole batch, such as a `total`. Required with several batches.
            metrics: Means over the samples of the micro-batch, for the record.
            retain_graph: As in `torch.Tensor.backward`.
            final: Whether this is the only backward of the micro-batch. If so, the backend
                "lockstep" exchanges the gradients of the last micro-batch during its backward.

        Raises:
            LossError: The loss is not a scalar that depends on a trainable parameter.
            UsageError: No micro-batch is being computed.
        """
        loop = self._entered()
        if share is None and loop.current is not None and loop.parallel.loss_weight is None:
            size = loop.current.microbatch.size
            warn_of_denominator(loop.step, loss, size, "step.backward(loss)")
        if share is not None:
            share = read_number(loop, "share= of step.backward", share)
        for name, value in (metrics or {}).items():
            require_number(f"{loop.place}: metrics={name} of step.backward", value)
        loop.backward(loss, share=share, metrics=metrics, retain_graph=retain_graph, final=final)

    def total(self, count: Callable[[Any], float], *batches: Any) -> float:
        """Return the sum of a number of each micro-batch over the whole batch, the same everywhere.

        Divide by it a loss that is a mean over something else than samples, and pass the loss to
        `backward` with `share=1`. Call it on every rank, before or after the loop.

        Args:
            count: A function of the data of a micro-batch that returns its number, such as that
                of its boxes.
            *batches: As for `microbatches`.
        """
        return add_counts(self._entered(), count, *(batches or self._batches))

    def gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of all samples of the batch in their order, on every rank.

        Call it on every rank, after the loop over `microbatches`. What you keep of the result,
        such as hidden states, belongs into a buffer of a module in `extra_modules`, which you
        write after the step.

        Args:
            tensors: One tensor for each micro-batch of this rank, in their order, with a row per
                sample. They are detached.

        Raises:
            UsageError: On every rank, if tensors do not fit together or a micro-batch has none.
        """
        return gather_whole_batch(self._entered(), tensors)

    def backward_whole_batch(
        self,
        encode: Callable[[Any], Any],
        loss: Callable[..., torch.Tensor],
        *batches: Any,
    ) -> torch.Tensor:
        """Run backward from a loss that compares the samples of the whole batch.

        Takes the place of the loop over `microbatches`. A first pass computes the outputs of all
        micro-batches, and every rank the loss of all outputs. A second pass, with the same random
        numbers and buffers, computes each micro-batch again and runs its backward.

        Args:
            encode: A function of the data of a micro-batch that returns a tensor, or a tuple of
                tensors, with a row per sample: what the loss needs of the samples.
            loss: A function of these tensors for the whole batch, in the order of its samples,
                that returns a scalar.
            *batches: As for `microbatches`.

        Returns:
            The loss, the same on every rank.

        Raises:
            LossError: The loss is not a scalar that depends on the outputs.
            StateError: The second pass computes other outputs than the first.
            UsageError: An output has not one row per sample.
        """
        return backward_whole_batch(self._entered(), encode, loss, *(batches or self._batches))

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


def _continue_alike(loop: MicrobatchLoop, microbatches: Iterator[Any]) -> Iterator[Any]:
    """Yield micro-batches; what the block draws after them is the same on every rank."""
    yield from watch_loop(loop.step, microbatches)
    if loop.step.batch is not None:
        loop.scopes.begin_microbatch(loop.step.number, loop.step.batch.leaves)
