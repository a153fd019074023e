"""The context of one step on this rank: its inputs and its results.

    kernel.step      begins an attempt            ─┐
    executor         computes the micro-batches    ├─> one StepContext, filled from top to bottom
    kernel.step      reads the results            ─┘

An executor gets the context and writes its results into it; it does not depend on their use.

A failed step is repeated under the same number, so ranks at different attempts can have the same
step number. Every exchange of a step therefore compares the number of the attempt:

             step 0      step 1      step 2      step 2
    rank 0   attempt 0   attempt 1   attempt 2 . . . . .  waits for the gradients of the others
    rank 1   attempt 0   attempt 1   attempt 2   attempt 3
                                     raised, and the loop continued with the next batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from lockstep.kernel.batch import Batch, Microbatch
from lockstep.kernel.errors import DisagreementError
from lockstep.kernel.layout import StepLayout

__all__ = [
    "NOTHING",
    "Attempt",
    "ComputedMicrobatch",
    "MicrobatchResult",
    "Phase",
    "Position",
    "StepContext",
    "StepFailure",
    "StepLabel",
    "StepObserver",
    "StepTimes",
    "StepWarning",
    "WarningKind",
]


NOTHING: AbstractContextManager[None] = nullcontext()
"""A context without an effect, which every micro-batch enters several times."""

Phase = Literal["data", "forward", "backward", "reduction", "optimizer"]
"""A phase of a step; "reduction" is the summation of gradients and buffers, and clipping."""

Position = Callable[[], tuple[int, int] | None]
"""A function that returns the (micro-batch, stage) being computed; None between them."""

WarningKind = Literal["", "ignored_targets", "not_additive", "time_first"]
"""The kind of a warning on which something depends: the loss ignores some targets; it is not the
sum of the losses of its halves times their shares; a module takes samples for time steps."""


class StepWarning(NamedTuple):
    """A warning of a step.

    Attributes:
        place: The rank, the step and the micro-batch.
        sentence: The sentence, which is the same at any place.
        kind: Its kind; "" for one on which nothing depends.
    """

    place: str
    sentence: str
    kind: WarningKind = ""


@dataclass
class Attempt:
    """One attempt at a step of a trainer, on this rank.

    Attributes:
        trainer: The number of the trainer in the world, from 0.
        step: The number of the step, from 0; counts finished steps only.
        number: The number of the attempt, from 0; counts all attempts.
        previous_failure: The failure of the previous attempt on this rank; "" for none.
        failure: The failure of this attempt on this rank; "" for none.
        is_agreed: Whether the statuses have been exchanged and the step is not committed yet, so
            that errors are raised on every rank.
    """

    trainer: int
    step: int
    number: int
    previous_failure: str = ""
    failure: str = ""
    is_agreed: bool = False

    def fail(self, error: BaseException) -> None:
        """Note that this attempt raised `error`, or the first failure of several in succession.

        A script that catches the first one gets others, since its ranks then make different calls.
        """
        kind = type(error).__name__
        first = (str(error).splitlines() or [""])[0]
        failure = f"attempt {self.number}, at step {self.step}, raised {kind}: {first}"
        if isinstance(error, DisagreementError) and error.cause:
            failure = f"attempt {self.number} came after a failure {error.cause}"
        self.failure = self.previous_failure or failure

    def __str__(self) -> str:
        """Return the description that every exchange of the attempt compares."""
        return f"in step {self.step} of trainer {self.trainer} (attempt {self.number})"


@dataclass(frozen=True)
class StepLabel:
    """The label of a step, which must be the same on all ranks that take the step.

    Attributes:
        step: The number of the step.
        about: The attempt and the shape of its batch, in words.
        batch: The identity of this rank's batch; see `lockstep.data.consistency`.
        remark: The failure of the previous attempt on this rank, for messages. Not compared.
    """

    step: int
    about: str
    batch: str
    remark: str


class MicrobatchResult(NamedTuple):
    """The results of one micro-batch.

    Attributes:
        leaf: The index of the micro-batch.
        size: The number of its samples.
        share: Its share of the batch's loss.
        loss: Its loss, not multiplied by the share; None if a script's loop has not passed it on.
        metrics: Its metrics by name, each with its weight in the mean over the batch.
    """

    leaf: int
    size: int
    share: float
    loss: float | None
    metrics: Mapping[str, tuple[float, float]] = MappingProxyType({})


@dataclass(slots=True)
class ComputedMicrobatch:
    """A micro-batch whose losses and metrics are still tensors.

    A metric is a value, whose weight is the number of samples, or a pair of value and weight.
    """

    microbatch: Microbatch
    share: float
    losses: list[torch.Tensor]
    metrics: dict[str, Any]


class StepObserver:
    """An observer of the micro-batches of one step; a hook adds it to `StepContext.observers`.

    The methods of this class do nothing.
    """

    observes_microbatches = False
    """Whether `record_microbatch` needs the gradients of every micro-batch in `.grad`."""

    def select(self, batch: Batch) -> Batch:
        """Return the part of this rank's batch that the step computes."""
        return batch

    def begin_microbatch(self) -> None:
        """Handle the beginning of a micro-batch, or of its forward through a stage."""

    def watch_loss(
        self, loss: Callable[..., Any], microbatch: Microbatch, data: Any
    ) -> Callable[..., Any]:
        """Return the trainer's loss, or a function that is called in its place.

        Args:
            loss: The loss.
            microbatch: The micro-batch that is being computed.
            data: Its data on the device.
        """
        return loss

    def record_loss(self, loss: torch.Tensor) -> None:
        """Handle the loss of a micro-batch, before its backward begins."""

    def record_graph(self, root: torch.Tensor, place: tuple[int, int]) -> None:
        """Handle the root of a graph: a loss, or an output of a stage.

        Args:
            root: The tensor.
            place: The step and the micro-batch.
        """

    def record_microbatch(
        self,
        microbatch: int,
        gradients: Mapping[str, int],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Handle the gradients' hashes and the buffers of a micro-batch; per stage with stages."""

    def record_phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context of a phase of the step."""
        return NOTHING

    def record_reduction(self, losses: Mapping[int, float]) -> None:
        """Handle this rank's losses by micro-batch; called when `.grad` has the reduced sums."""


FailureKind = Literal["stopped", "failure"]


@dataclass(frozen=True)
class StepFailure:
    """The failure of a step on this rank, which stops it on every rank.

    Attributes:
        kind: "stopped" if a stage could not continue, on any rank; otherwise "failure".
        sentence: The error in words, with the place of the stage that caused it.
        error: The exception of a stage of this rank.
    """

    kind: FailureKind
    sentence: str
    error: Exception | None = None


@dataclass
class StepTimes:
    """The times of a step on this rank, by `time.perf_counter`, in seconds.

    Attributes:
        begun: When the executor began.
        loading: Seconds for data that were loaded between the micro-batches.
        computed: When the last micro-batch was computed.
        arrived: When the exchange of the statuses began.
        exchanged: When the statuses were exchanged.
        reduced: When gradients and buffers were reduced.
        updated: When the optimizer was done, without the wait for the ranks of an elastic run.
        left: When the script got the gradients, without the time of its optimizers since then; 0
            if the step itself updates the weights.
        waited: The seconds for which this process had waited for others until then.
    """

    begun: float = 0.0
    loading: float = 0.0
    computed: float = 0.0
    arrived: float = 0.0
    exchanged: float = 0.0
    reduced: float = 0.0
    updated: float = 0.0
    left: float = 0.0
    waited: float = 0.0


# It has many attributes: the inputs and the results of an attempt, which executors fill in.
@dataclass
class StepContext:
    """One attempt at an optimizer step on this rank.

    Attributes:
        attempt: The number and the step of the attempt.
        parallel: The layout, the loss and the arithmetic.
        observers: The observers of the micro-batches, which hooks have added.
        backward_checks: What hooks call before each backward pass of a script's loop, with the
            number of the micro-batch. Unlike observers, they need not see single micro-batches.
        batch: This rank's part of the batch; None until it is known.
        shares: The shares in the loss of all micro-batches, on all ranks, that are computed.
        samples: The number of samples of these micro-batches.
        computed: The micro-batches that this rank has computed.
        warnings: The warnings, for the record.
        times: When the parts of the step began and ended.
        failure: The failure that stops the step on every rank.
        refusal: Why the step is refused on every rank, such as a forbidden write; "" if it is not.
        is_repeatable: Whether a hook may have the step computed again.
        may_overflow: Whether the script scales its losses, so that gradients may overflow.
    """

    attempt: Attempt
    parallel: StepLayout
    observers: list[StepObserver] = field(default_factory=list)
    backward_checks: list[Callable[[int], None]] = field(default_factory=list)
    batch: Batch | None = None
    shares: Mapping[int, float] = field(default_factory=dict)
    samples: int = 0
    computed: list[ComputedMicrobatch] = field(default_factory=list)
    warnings: list[StepWarning] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    failure: StepFailure | None = None
    refusal: str = ""
    is_repeatable: bool = True
    may_overflow: bool = False

    def __post_init__(self) -> None:
        """Keep the number of the step, and its place for messages."""
        self.number = self.attempt.step
        self.where = f"rank {self.parallel.rank}, step {self.number}"

    @cached_property
    def label(self) -> StepLabel:
        """The label that must be the same on all ranks; available once the batch is known."""
        assert self.batch is not None, "the step has no batch yet"
        batch = self.batch
        attempt = self.attempt
        about = f"{attempt}, with a batch of {batch.size} samples in {batch.leaves} micro-batches"
        if (scale := self.parallel.loss_scale) is not None:
            about += f" and a loss scale of {scale.value:g}"
        return StepLabel(attempt.step, about, batch.identity.pack(), attempt.previous_failure)

    def in_phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context of a phase of the step, in which operators may be recorded."""
        for observer in self.observers:
            if (recording := observer.record_phase(phase)) is not NOTHING:
                return recording
        return NOTHING

    @property
    def is_stopped(self) -> bool:
        """Whether a stage could not continue, on this rank or on another one."""
        return self.failure is not None and self.failure.kind == "stopped"

    def refuse(self, sentence: str) -> None:
        """Stop the step on every rank."""
        self.refusal = self.refusal or sentence

    def warn(self, place: str, sentence: str, kind: WarningKind = "") -> None:
        """Add a warning to those of the step."""
        self.warnings.append(StepWarning(place, sentence, kind))

    def has_warned(self, kind: WarningKind) -> bool:
        """Return whether there is a warning of this kind on this rank."""
        return any(warning.kind == kind for warning in self.warnings)

    def place(self, microbatch: int) -> str:
        """Return the rank, the step and the micro-batch, for messages."""
        return f"{self.where}, micro-batch {microbatch}"

    def observe_microbatch(
        self,
        microbatch: int,
        gradients: Callable[[], Mapping[str, int]],
        buffers: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        """Show the gradients' hashes and the buffers of a micro-batch to the observers."""
        for observer in self.observers:
            if observer.observes_microbatches:
                observer.record_microbatch(microbatch, gradients(), buffers())

    def find_loss(self, microbatch: Microbatch, data: Any) -> Callable[..., Any] | None:
        """Return the trainer's loss for a micro-batch, which observers may watch."""
        loss = self.parallel.loss
        if loss is not None:
            for observer in self.observers:
                loss = observer.watch_loss(loss, microbatch, data)
        return loss

    def require_same_batch(self) -> None:
        """Raise DisagreementError, on every rank, if ranks have different batches."""
        label = self.label
        self.parallel.messages.require_same_batch(
            label.batch, label.about, label.step, label.remark
        )
