"""The context of one step on this rank: its inputs and its results.

    Trainer          begins an attempt            ─┐
    executor         computes the micro-batches    ├─> one StepContext, filled from top to bottom
    training.step    reads the results            ─┘

An executor gets the context and writes its results into it; it does not depend on their use.

A failed step is repeated under the same number, so ranks at different attempts can have the same
step number. Every exchange of a step therefore compares the number of the attempt:

             step 0      step 1      step 2      step 2
    rank 0   attempt 0   attempt 1   attempt 2 . . . . .  waits for the gradients of the others
    rank 1   attempt 0   attempt 1   attempt 2   attempt 3
                                     raised, and the loop continued with the next batch
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.collectives import (
    all_gather_bytes,
    all_reduce_messages,
    gather_unless_equal,
    has_many_ranks,
)
from lockstep.data.consistency import require_same_batch
from lockstep.data.microbatch import Batch, Microbatch
from lockstep.kernel.errors import LossError
from lockstep.kernel.loss_weights import compute_shares, count_ignored_targets, is_sum
from lockstep.kernel.splitting import split_evenly
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.forward import check_scalar
from lockstep.model.loss_check import LossCheck, is_due
from lockstep.model.operator_call import Phase
from lockstep.model.parallel_context import NOTHING, ParallelContext

__all__ = [
    "IGNORED_TARGETS",
    "Attempt",
    "ComputedMicrobatch",
    "MicrobatchResult",
    "Position",
    "Span",
    "StepContext",
    "StepLabel",
    "StepObserver",
    "begin_attempts",
]


Position = Callable[[], tuple[int, int] | None]
"""A function that returns the (micro-batch, stage) being computed; None between them."""

LARGEST = 1 << 53
"""Whole numbers below this have an exact sum in float64."""

IGNORED_TARGETS = "ignores some targets"
"""The words by which the warning of such a loss is recognized."""


@dataclass
class Attempt:
    """One attempt at a step of a trainer, on this rank.

    Attributes:
        trainer: The number of the trainer in the world, from 0.
        step: The number of the step, from 0; counts finished steps only.
        number: The number of the attempt, from 0; counts all attempts.
        previous_failure: The failure of the previous attempt on this rank; "" for none.
        failure: The failure of this attempt on this rank; "" for none.
    """

    trainer: int
    step: int
    number: int
    previous_failure: str = ""
    failure: str = ""

    def following(self, step: int) -> Attempt:
        """Return the next attempt, at step `step`."""
        return Attempt(self.trainer, step, self.number + 1, previous_failure=self.failure)

    def fail(self, error: BaseException) -> None:
        """Note that this attempt raised `error`."""
        first = (str(error).splitlines() or [""])[0]
        self.failure = (
            f"attempt {self.number}, at step {self.step}, raised {type(error).__name__}: {first}"
        )

    def __str__(self) -> str:
        """Return the description that every exchange of the attempt compares."""
        return f"in step {self.step} of trainer {self.trainer} (attempt {self.number})"


_trainers = 0  # made so far, by this rank or by others of its worlds


def begin_attempts(group: dist.ProcessGroup | None) -> Attempt:
    """Number a trainer, and return the attempt before its first one; a collective call.

    The number of the trainer is the same on every rank.
    """
    global _trainers
    number = all_reduce_messages(
        _trainers, max, lambda value: str(value).encode(), int, "making a trainer", group
    )
    _trainers = number + 1
    return Attempt(number, step=0, number=-1)


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

    def require_same(self, group: dist.ProcessGroup | None) -> None:
        """Compare the labels of all ranks.

        Raises:
            DisagreementError: The labels differ. Raised on every rank.
        """
        labels = gather_unless_equal(self.batch.encode(), self.about, group, self.remark)
        if labels:
            require_same_batch([each.decode() for each in labels], self.step)


class MicrobatchResult(NamedTuple):
    """The results of one micro-batch.

    Attributes:
        leaf: The index of the micro-batch.
        size: The number of its samples.
        share: Its share of the batch's loss.
        loss: Its loss, not multiplied by the share.
        metrics: Its metrics by name.
    """

    leaf: int
    size: int
    share: float
    loss: float
    metrics: Mapping[str, float] = MappingProxyType({})


@dataclass
class ComputedMicrobatch:
    """A micro-batch whose losses and metrics are still tensors."""

    microbatch: Microbatch
    share: float
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def result(self) -> MicrobatchResult:
        """Return the results as numbers; waits for the device."""
        loss = 0.0
        for each in self.losses:
            loss += float(each)
        metrics = {name: float(value) for name, value in self.metrics.items()}
        index, size = self.microbatch.index, self.microbatch.size
        return MicrobatchResult(index, size, self.share, loss, metrics)


class Span(NamedTuple):
    """One action of a pipeline stage, for the timeline.

    Attributes:
        kind: "forward", "backward", "input" or "weight".
        stage: The number of the stage.
        microbatch: The number of the micro-batch.
        begin: The start by `time.perf_counter`, in seconds, including the waiting.
        end: The end by the same clock.
        waited: Seconds after `begin` that it waited for another rank.
        source: The rank that it waited for; -1 for none.
        received: The bytes received from that rank.
    """

    kind: str
    stage: int
    microbatch: int
    begin: float
    end: float
    waited: float
    source: int
    received: int


class StepObserver(Protocol):
    """The interface of an observer of steps, for a command such as `lockstep check`."""

    def recording(
        self, step: StepContext, position: Callable[[], tuple[int, int] | None]
    ) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches are computed.

        Args:
            step: The step.
            position: A function that returns the (micro-batch, stage) being computed; None between
                them.
        """

    def select(self, batch: Batch) -> Batch:
        """Return the part of this rank's batch that the step computes."""

    def record_loss(self, loss: torch.Tensor) -> None:
        """Handle the loss of a micro-batch, before its backward begins."""

    def record_refusal(self, sentence: str) -> None:
        """Handle the error with which the trainer would have stopped; "" for none."""

    def record_reduction(self, losses: Mapping[int, float]) -> None:
        """Handle this rank's losses by micro-batch; called when `.grad` has the reduced sums."""


MicrobatchObserver = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]


@dataclass
class StepContext:
    """One attempt at an optimizer step on this rank.

    Attributes:
        attempt: The number and the step of the attempt.
        parallel: The layout, the loss and the arithmetic.
        observer: The observer, for a command such as `lockstep check`; None if there is none.
        phase_recorder: A function that returns the context in which the operators of a phase are
            recorded; None if they are not recorded.
        observe_microbatch: A function that is called with the number of each computed micro-batch,
            and its gradients and buffers by name; with stages, once per stage. None: not called.
        is_recorded: Whether the step is recorded or replayed, so that its batch is hashed.
        stops_at_refusals: Whether the trainer stops at an error despite the observer. False: the
            observer records the error, and the step continues.
        is_traced: Whether the executor keeps spans.
        is_checkpoint_due: Whether rank 0 wants a checkpoint after the step.
        admits: The same as in the status of rank 0; see `lockstep.training.rank_status`.
        batch: This rank's part of the batch; None until it is known.
        shares: The shares in the loss of all micro-batches, on all ranks, that are computed.
        samples: The number of samples of these micro-batches.
        computed: The micro-batches that this rank has computed.
        spans: The actions of this rank's stages, if the step is traced.
        warnings: Sentences for the record.
        idle: Seconds that a stage waited for its neighbours.
        failure: The sentence about an error that stops the step on every rank; "" for none.
        error: The error of a stage of this rank, which ends the step on every rank.
        stopped: The error as a sentence with the place of the stage that caused it, on any rank.
        begun: The time of `time.perf_counter` at which the executor began.
        is_agreed: Whether the statuses have been exchanged and the step is not committed yet, so
            that errors are raised on every rank.
    """

    attempt: Attempt
    parallel: ParallelContext
    observer: StepObserver | None = None
    phase_recorder: Callable[[Phase], AbstractContextManager[None]] | None = None
    observe_microbatch: MicrobatchObserver | None = None
    is_recorded: bool = False
    stops_at_refusals: bool = False
    is_traced: bool = False
    is_checkpoint_due: bool = False
    admits: int = -1
    batch: Batch | None = None
    shares: Mapping[int, float] = field(default_factory=dict)
    samples: int = 0
    computed: list[ComputedMicrobatch] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    idle: float = 0.0
    failure: str = ""
    error: Exception | None = None
    stopped: str = ""
    is_agreed: bool = False
    begun: float = 0.0
    _loss_check: LossCheck | None = None
    # The gradient of the last loss, its value and its version.
    _root_gradient: tuple[torch.Tensor | None, float, int] = (None, 0.0, 0)

    @property
    def number(self) -> int:
        """The number of the step."""
        return self.attempt.step

    @cached_property
    def label(self) -> StepLabel:
        """The label that must be the same on all ranks; available after `start`."""
        assert self.batch is not None, "the step has no batch yet"
        batch, attempt = self.batch, self.attempt
        about = f"{attempt}, with a batch of {batch.size} samples in {batch.leaves} micro-batches"
        if (scale := self.parallel.loss_scale) is not None:
            about += f" and a loss scale of {scale.value:g}"
        return StepLabel(attempt.step, about, batch.identity.pack(), attempt.previous_failure)

    def in_phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context of a phase of the step, in which operators may be recorded."""
        return NOTHING if self.phase_recorder is None else self.phase_recorder(phase)

    def place(self, microbatch: int) -> str:
        """Return the rank, the step and the micro-batch, for messages."""
        return self.parallel.place(self.number, microbatch)

    def start(self, batch: Any) -> Batch:
        """Set the batch of the step, and compute the shares of its micro-batches.

        A collective call if micro-batches have weights.

        Args:
            batch: This rank's part of a batch, or a whole batch of tensors, which is split.

        Raises:
            LossError: The weights of the micro-batches cannot be computed, or sum to 0.
        """
        whole = self.parallel.split(batch, self.is_recorded)
        self.batch = whole if self.observer is None else self.observer.select(whole)
        self.shares, self.samples = self._shares(whole, batch)
        return self.batch

    @property
    def checks_loss(self) -> bool:
        """Whether the trainer's loss is checked in this step."""
        return self.parallel.loss is not None and is_due(self.number)

    def watch_loss(
        self, microbatch: Microbatch, data: Any, modules: Callable[[], Mapping[str, nn.Module]]
    ) -> Callable[..., Any] | None:
        """Return the trainer's loss, which is checked when it is called, if `checks_loss`.

        Args:
            microbatch: The micro-batch that is being computed.
            data: Its data on the device.
            modules: A function that returns the modules that the step calls.
        """
        if any(IGNORED_TARGETS in each for each in self.warnings):
            return self.parallel.loss  # there is a warning already
        if self._loss_check is None:

            def warn(leaf: int, sentence: str) -> None:
                self.warnings.append(f"{self.place(leaf)}: {sentence}")

            self._loss_check = LossCheck(self.parallel, modules(), warn)
        return self._loss_check.watch(microbatch, data)

    def check_loss(self, loss: torch.Tensor, place: str) -> None:
        """Raise LossError unless `loss` is a scalar that backward can start from."""
        check_scalar(loss, place)
        if self.observer is not None:
            self.observer.record_loss(loss)
        if not loss.requires_grad:
            raise LossError(
                f"{place}: the loss depends on no trainable parameter; either all parameters are "
                "frozen, or the loss was computed under torch.no_grad() or detached by .detach(), "
                ".item() or .data"
            )

    def scale_loss(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        """Return the loss multiplied by its share of the batch and the loss scale."""
        scale = self.parallel.loss_scale
        return loss * share if scale is None else scale.scale(loss, share)

    def find_root(
        self, loss: torch.Tensor, share: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tensor at which backward begins, and its gradient (None for 1).

        The bits are the same as with `scale_loss`. Without a loss scale the share is the gradient,
        so the graph needs no multiplication.
        """
        if self.parallel.loss_scale is not None or not loss.is_floating_point():
            return self.scale_loss(loss, share), None
        known, value, version = self._root_gradient
        if (
            known is None
            or value != share
            or known._version != version  # a hook wrote to it
            or (known.shape, known.dtype, known.device) != (loss.shape, loss.dtype, loss.device)
        ):
            known = torch.full_like(loss, share)
            self._root_gradient = known, share, known._version
        return loss, known

    def _shares(self, batch: Batch, given: Any) -> tuple[Mapping[int, float], int]:
        parallel = self.parallel
        if is_sum(parallel.loss):
            return dict.fromkeys(range(batch.leaves), 1.0), batch.size
        if parallel.loss_weight is None:
            self._warn_of_ignored_targets(batch, given)
            return _share_by_size(batch.size, batch.leaves), batch.size
        sizes = {
            leaf: len(span) for leaf, span in enumerate(split_evenly(batch.size, batch.leaves))
        }
        mine = {
            each.index: self._weight(each)
            for each in batch.microbatches
            if each.data is not None  # inner stages have no data
        }
        if (known := self._count_weights(mine, sizes)) is not None:
            return known
        weights = self._gather_weights(mine)
        if not sum(weights.values()) > 0:
            raise LossError(
                f"rank {parallel.rank}, step {self.number}: the weights of the batch's "
                f"{batch.leaves} micro-batches sum to {sum(weights.values())}; check whether the "
                "targets of all samples in the batch are ignored"
            )
        found = compute_shares(weights)
        return found, sum(sizes[leaf] for leaf in found)

    def _count_weights(
        self, mine: Mapping[int, float], sizes: Mapping[int, int]
    ) -> tuple[dict[int, float], int] | None:
        """Return the shares of this rank's micro-batches, and the samples of all, from their sums.

        Sums of whole numbers are exact in any order. Other weights are added in the order of the
        micro-batches, and an inner stage has to know those of others, so these are gathered.

        Returns:
            None if the ranks are few, if they form stages, if some weight is not a whole number,
            or if the weights do not have a sum above 0.
        """
        parallel, label = self.parallel, self.label
        if parallel.stages > 1 or not has_many_ranks(parallel.group):
            return None
        is_whole = all(weight.is_integer() and 0 <= weight < LARGEST for weight in mine.values())
        counted = [leaf for leaf, weight in mine.items() if weight]
        whole = sum(map(int, mine.values())) if is_whole else 0
        total, samples, are_whole = all_reduce_messages(
            [whole, sum(sizes[leaf] for leaf in counted), is_whole],
            lambda left, right: [left[0] + right[0], left[1] + right[1], left[2] and right[2]],
            lambda value: json.dumps(value).encode(),
            json.loads,
            f"weighing {label.about}",
            parallel.group,
            label.remark,
        )
        if not are_whole or not 0 < total < LARGEST:
            return None
        return {leaf: mine[leaf] / total for leaf in counted}, samples

    def _gather_weights(self, mine: Mapping[int, float]) -> dict[int, float]:
        """Return the weights of all micro-batches, in leaf order, on every rank."""
        text = ",".join(f"{leaf}:{weight.hex()}" for leaf, weight in mine.items())
        label = self.label
        messages = all_gather_bytes(
            text.encode(), f"weighing {label.about}", self.parallel.group, label.remark
        )
        pairs = [
            pair.split(":") for message in messages for pair in message.decode().split(",") if pair
        ]
        return {int(leaf): float.fromhex(weight) for leaf, weight in pairs}

    def _weight(self, microbatch: Microbatch) -> float:
        assert self.parallel.loss_weight is not None
        place = self.place(microbatch.index)
        try:
            with CollectiveCallGuard(lambda: place):
                return float(self.parallel.loss_weight(microbatch.data))
        except Exception as error:
            raise LossError(
                f"{place}: the weight of the micro-batch could not be "
                f"computed: {type(error).__name__}: {error}"
            ) from error

    def _warn_of_ignored_targets(self, batch: Batch, given: Any) -> None:
        is_whole = not isinstance(given, Batch)
        if is_whole and not count_ignored_targets(self.parallel.loss, given):
            return  # one look at the whole batch, instead of one per micro-batch
        kind, advice = "", "lockstep.target_weight(loss) to the trainer"
        if self.parallel.loss is None:
            kind = " (labels of -100)"
            advice = (
                "lockstep.target_weight(torch.nn.CrossEntropyLoss()) to the trainer, with shift=1 "
                "in the call for a causal language model"
            )
        for each in batch.microbatches:
            if count_ignored_targets(self.parallel.loss, each.data):
                self.warnings.append(
                    f"{self.place(each.index)}: the loss {IGNORED_TARGETS}{kind}, so its mean is "
                    "not a mean over samples, and the gradient is not that of the whole batch; "
                    f"pass loss_weight={advice}"
                )
                return


@lru_cache(maxsize=64)
def _share_by_size(samples: int, leaves: int) -> Mapping[int, float]:
    """Return the share of each micro-batch of a batch whose samples count alike."""
    sizes = map(len, split_evenly(samples, leaves))
    return {leaf: size / samples for leaf, size in enumerate(sizes)}
