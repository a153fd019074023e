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
from lockstep.kernel.errors import LockstepError, UsageError
from lockstep.kernel.parts import GradientSums
from lockstep.kernel.rng_scopes import RngScopes
from lockstep.kernel.step_context import NOTHING, ComputedMicrobatch, StepContext, StepFailure
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.forward import Metric, explain_batch_norm, forward
from lockstep.model.loss_root import LossRoot, read_gradients, record_loss, run_backward
from lockstep.model.loss_shares import start_batch
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.watched_calls import ComputeAgain
from lockstep.training.kept_work import KeptWork, LeavesShare, RestOfStep, agree_on_rest
from lockstep.training.one_pass.grouped_passes import GroupedPasses, PassResults, PassTrial

__all__ = ["CollectedGradients", "MicrobatchLoop"]

ONE_BATCH = (
    "one step takes one batch: pass several to one call, as in step.microbatches(labeled, "
    "unlabeled), or begin another step for the next batch"
)


class MicrobatchSums(Protocol):
    """The sums of one step, to which micro-batches are added."""

    failure: str
    """Why the gradients cannot be added; "" if they can."""

    def accumulate(self, microbatch: int) -> None:
        """Add the gradients in `.grad` as those of a micro-batch."""

    def skip(self, microbatch: int) -> None:
        """Leave out a micro-batch that is not computed."""


class CollectedGradients(GradientSums, Protocol):
    """The sums of gradients, while micro-batches are added to them."""

    @property
    def can_launch_early(self) -> bool:
        """Whether sums may be exchanged while the last backward pass runs."""

    is_observed: bool
    """Whether `hash_current` is called after each micro-batch."""

    def enter_group(self) -> None:
        """Discard the plans for the ranks of an earlier group."""

    def begin(
        self, leaves: int, hosts: Hosts, announce: Callable[[], object] | None
    ) -> MicrobatchSums:
        """Start a step of `leaves` micro-batches; `announce` compares it with other ranks."""

    def hash_current(self) -> dict[str, int]:
        """Return hashes of the micro-batch's gradients by the names of their parameters."""

    def hash_again(self, compute: ComputeAgain) -> tuple[dict[str, int], torch.Tensor]:
        """Compute a micro-batch again; return the hashes of its gradients, and its loss."""

    def discard(self) -> None:
        """Forget a micro-batch that was computed again."""

    def watch_backward(self, loss: torch.Tensor, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of this rank's last backward pass."""

    def launch_remaining(self) -> None:
        """Begin to exchange the sums that are complete."""


# It has many attributes: what a step is given, and the micro-batch that is being computed.
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
        one_pass: What computes several micro-batches together; None: nothing does.
        result: The result of the step; None before it is committed.
        place: The rank, the step and the micro-batch, for messages.
        kept: What this rank has computed in an earlier attempt; None: nothing.
        is_first_of_round: Whether the ranks agree on what is left of the step first.
        current: The micro-batch that is being computed; None between them.
        is_skipped: Whether the script gave it the weight 0.
    """

    def __init__(
        self,
        step: StepContext,
        called: nn.Module,
        metrics: Mapping[str, Metric],
        parallel: ParallelContext,
        scopes: RngScopes,
        buffers: Buffers,
        gradients: CollectedGradients,
        roots: LossRoot,
        parameters: Sequence[nn.Parameter],
        one_pass: GroupedPasses | None = None,
    ) -> None:
        self.one_pass = one_pass
        self.step = step
        self.parallel = parallel
        self._called = called
        self._metrics = metrics
        self.result: StepResult | None = None
        self.buffers = buffers
        self.gradients = gradients
        self.scopes = scopes
        self.roots = roots
        self.parameters = parameters
        self._given: tuple[Any, ...] = ()
        self._iteration: Iterator[Any] | None = None
        self._sums: MicrobatchSums
        self._has_sums = False
        self._is_rest = False  # whether another attempt has computed other micro-batches
        self.kept: KeptWork | None = None
        self.is_first_of_round = False
        self.current: ComputedMicrobatch | None = None
        self.is_skipped = False
        self._watched = -1  # the micro-batch in whose backward buckets are launched
        self._noted: list[tuple[int, int] | None] | None = None  # gradients after backward
        self._has_buffers = bool(buffers.slots)
        self._is_on_cpu = parallel.device_type == "cpu"
        self._autocast = NOTHING if parallel.autocast_dtype is None else parallel.autocast()
        self._first_place = f"{step.where}, micro-batch 0"
        self.place = self._first_place

    @property
    def position(self) -> tuple[int, int] | None:
        """The index of the micro-batch that is being computed, and its stage, which is 0."""
        return (self.current.microbatch.index, 0) if self.current else None

    @property
    def microbatch(self) -> Microbatch:
        """The micro-batch that is being computed."""
        assert self.current is not None
        return self.current.microbatch

    def start(self, *batches: Any) -> Batch:
        """Set the batch of the step, of several the batch of their pairs; return this rank's part.

        A collective call, unless the same batches are set.
        """
        if not self._given:
            self._given = batches
            self._whole = batches[0]
            if len(batches) > 1:
                self._whole = join_batches([self.parallel.split(batch) for batch in batches])
            return start_batch(self.step, self._whole, self.parallel.count_ignored)
        if [*map(id, batches)] != [*map(id, self._given)]:
            raise UsageError(ONE_BATCH)
        assert self.step.batch is not None
        return self.step.batch

    def own_microbatches(self) -> tuple[Microbatch, ...]:
        """Return this rank's micro-batches, also those that an observer has left out."""
        return self.parallel.split(self._whole).microbatches

    def compute(self, batch: Any) -> None:
        """Compute every micro-batch of this rank with the trainer's loss."""
        if self.one_pass is not None and not self.is_first_of_round:
            self._compute_groups(self.one_pass, batch)
            return
        for data in self.microbatches(batch):
            self._compute_one(data)

    def _compute_one(self, data: Any) -> None:
        """Compute the current micro-batch with the trainer's loss."""
        loss_function = self.parallel.loss
        step = self.step
        if step.observers:
            loss_function = step.find_loss(self.microbatch, data)
        loss, metrics = forward(self._called, loss_function, self._metrics, data, self.place)
        self.backward(loss, metrics=metrics, final=True)

    def _compute_groups(self, one_pass: GroupedPasses, batch: Any) -> None:
        """Compute the micro-batches in groups, each in one pass if it has the same bits."""
        for group in one_pass.divide(self.step, self.begin_batch((batch,))):
            results = one_pass.compute(self.step, self.buffers, group)
            if results is not None:
                self.end_group(group, results)
                continue
            trial = one_pass.begin_trial(self.step, self.buffers, group)
            if trial is not None:
                self.keep_gradients()
            for microbatch in group:
                data = self.begin(microbatch)
                if self.current is None:
                    continue
                self._compute_one(data)
                if trial is not None:
                    self.note_in(trial)
                self.end()
            if trial is not None:
                trial.finish()
        self.close_sums()

    def note_in(self, trial: PassTrial) -> None:
        """Note the results of the current micro-batch in a trial, before it ends."""
        current = self.current
        assert current is not None
        sums: Any = self._sums  # whole ones, since there are no trials of sharded models
        trial.note(current.losses[-1], current.metrics, sums.hash_node)

    def keep_gradients(self) -> None:
        """Let all gradients be in `.grad` after each backward pass, also after the last one."""
        self._watched = -1

    def end_group(self, group: Sequence[Microbatch], results: PassResults) -> None:
        """End micro-batches that were computed together: the gradients are those of a node."""
        step = self.step
        for number, microbatch in enumerate(group):
            share = step.shares[microbatch.index]
            loss = results.losses[number]
            metrics = results.metrics[number]
            step.computed.append(ComputedMicrobatch(microbatch, share, [loss], metrics))
            if self._has_buffers:
                size = microbatch.size / step.samples
                self.buffers.collect(microbatch.index, size, results.buffers[number])
        sums: Any = self._sums
        sums.accumulate_node((group[0].index, group[-1].index + 1))

    def microbatches(self, *batches: Any) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches of a batch, one after another."""
        if self._iteration is not None:
            raise UsageError(ONE_BATCH)
        self._iteration = self._microbatches(batches)
        return self._iteration

    def begin_batch(self, batches: tuple[Any, ...]) -> Batch:
        """Set the batch of the step, and begin to add gradients; return what is to be computed."""
        rest = agree_on_rest(self.kept, self.step) if self.is_first_of_round else None
        if rest is not None:
            batch = self._continue(batches[0], rest)
        else:
            if self._given or len(batches) > 1:
                batch = self.start(*batches)
            else:  # the usual case, without a call
                self._given = batches
                self._whole = batches[0]
                batch = start_batch(self.step, self._whole, self.parallel.count_ignored)
            self.open(batch)
        return batch

    def _microbatches(self, batches: tuple[Any, ...]) -> Iterator[Any]:
        batch = self.begin_batch(batches)
        autocast = self._autocast
        for microbatch in batch.microbatches:
            data = self.begin(microbatch)
            if self.current is None:
                continue
            if autocast is NOTHING:
                yield data
            else:
                with autocast:
                    yield data
            if self.is_skipped:
                self.skip()
                continue
            if not self.current.losses:
                raise UsageError(
                    f"{self.place}: batch.backward(loss), or step.backward(loss) in a manual step, "
                    "was not called: write it instead of loss.backward(), in the body of the loop "
                    "over the micro-batches, before the next one is requested, as list(batch) or "
                    "unpacking a batch does"
                )
            if self._noted is not None:
                self._require_gradients()
            self.end()
        self.close_sums()

    # --- what is left of a step after a rank was lost -------------------------------------------

    def keep(self) -> KeptWork | None:
        """Return what this rank has computed; None if the step has no batch yet."""
        return KeptWork(self.step, self._sums, self.buffers) if self._has_sums else self.kept

    def _continue(self, whole: Any, rest: RestOfStep) -> Batch:
        """Continue with what was kept; return the batch with the micro-batches that are left."""
        step = self.step
        parallel = self.parallel
        own = self.parallel.share
        share = LeavesShare(own.microbatches, own.hosts, own.replica, leaves=rest.leaves)
        batch = parallel.split(whole, share)
        step.batch = batch
        step.shares = rest.shares
        step.samples = rest.samples
        parallel.held_nodes = rest.nodes_by_rank
        gradients: Any = self.gradients  # whole ones, since ranks with shards are replaced
        sums = None
        if self.kept is not None:
            step.computed = [*self.kept.step.computed]
            self.buffers.adopt(self.kept.buffers)
            sums = self.kept.sums
        self._sums = gradients.resume(sums, batch.leaves, rest.nodes_by_rank)
        self._has_sums = True
        self._is_rest = True
        return batch

    # --- a micro-batch -------------------------------------------------------------------------

    def open(self, batch: Batch) -> None:
        """Begin to add the gradients of this rank's part of the batch."""
        step = self.step
        parallel = self.parallel
        if parallel.is_sharded:
            parallel.share.require_turns(batch.leaves, len(step.shares))
        self._sums = self.gradients.begin(batch.leaves, parallel.hosts, step.require_same_batch)
        self._has_sums = True
        is_read = bool(step.observers) and any(one.observes_microbatches for one in step.observers)
        self.gradients.is_observed = is_read
        has_peers = parallel.replicas > 1
        if has_peers and batch.microbatches and self.gradients.can_launch_early and not is_read:
            self._watched = batch.microbatches[-1].index

    def begin(self, microbatch: Microbatch) -> Any:
        """Begin a micro-batch, and return its data; `current` stays None if its weight is 0."""
        step = self.step
        index = microbatch.index
        share = step.shares.get(index)
        if share is None:
            self._sums.skip(index)
            return None
        self.current = ComputedMicrobatch(microbatch, share, [], {})
        self.place = f"{step.where}, micro-batch {index}"
        # Each micro-batch begins with the buffers of the step.
        if self._has_buffers:
            self.buffers.install_copies()
        for observer in step.observers:
            observer.begin_microbatch()
        # Last, so that nothing of the above draws from the micro-batch's generators.
        self.scopes.begin_microbatch(step.number, index)
        if self._is_on_cpu:
            return microbatch.data
        return self.parallel.move_to_device(microbatch.data)

    def end(self) -> None:
        """End the micro-batch, whose backward has run: its gradients become a leaf of the tree."""
        step = self.step
        current = self.current
        assert current is not None
        if step.observers:
            index = current.microbatch.index
            step.observe_microbatch(index, self.gradients.hash_current, self.buffers.current)
            with step.in_phase("reduction"):
                self._collect(current.microbatch)
        else:
            self._collect(current.microbatch)
        step.computed.append(current)
        self.current = None
        self.place = self._first_place

    def skip(self) -> None:
        """End the micro-batch without its gradients and its loss, because its weight is 0."""
        assert self.current is not None
        for parameter in self.parameters:
            parameter.grad = None
        microbatch = self.current.microbatch
        if self._has_buffers:
            self.buffers.collect(microbatch.index, microbatch.size / self.step.samples)
        self._sums.skip(microbatch.index)
        self.is_skipped = False
        self.current = None
        self.place = self._first_place

    def _require_gradients(self) -> None:
        """Refuse a body that has written to gradients, if some are sent while backward runs."""
        noted = self._noted
        self._noted = None
        if noted != read_gradients(self.parameters):
            raise UsageError(
                f"{self.place}: the gradients were changed between backward and the end of the "
                "micro-batch, while those of the last micro-batch are sent to other ranks during "
                "backward: change or clip them after the loop over the batch, or scale the loss"
            )

    def close_sums(self) -> None:
        """End the sums after this rank's last micro-batch."""
        if self._is_rest:
            sums: Any = self._sums
            sums.fold()
        if self._sums.failure:
            self.step.failure = StepFailure("failure", self._sums.failure)
        if self.parallel.replicas > 1:
            self.gradients.launch_remaining()

    def _collect(self, microbatch: Microbatch) -> None:
        """Add the results of a micro-batch to those of the others."""
        if self._has_buffers:
            self.buffers.collect(microbatch.index, microbatch.size / self.step.samples)
        self._sums.accumulate(microbatch.index)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        share: float | None = None,
        metrics: Mapping[str, Any] | None = None,
        retain_graph: bool = False,
        final: bool = False,
        root: torch.Tensor | None = None,
    ) -> None:
        """Run backward from the loss of the current micro-batch, or from a scaled one, `root`."""
        step = self.step
        current = self.current
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
            share = step.shares[index]
        for check in step.backward_checks:
            check(index)
        self.note_loss(loss, share)
        for observer in step.observers:
            observer.record_graph(loss, (step.number, index))
        if metrics:
            current.metrics.update(metrics)
        is_watched = final and index == self._watched
        if is_watched or torch.is_autocast_enabled(self.parallel.device_type):
            with self.parallel.without_autocast():
                start, gradient = self.roots.find(loss if root is None else root, share)
                with self.gradients.watch_backward(start, index) if is_watched else NOTHING:
                    run_backward(start, gradient, retain_graph)
        else:
            start, gradient = self.roots.find(loss if root is None else root, share)
            run_backward(start, gradient, retain_graph)
        if self._watched >= 0:
            self._noted = read_gradients(self.parameters)

    def note_loss(self, loss: torch.Tensor, share: float) -> None:
        """Note a loss of the current micro-batch, and its share in that of the batch."""
        current = self.current
        assert current is not None
        # The report multiplies by the micro-batch's share. A loss that was scaled here instead
        # would be rounded to its dtype.
        if share and not current.losses:
            current.share = share
        factor = 1.0 if share == current.share else share / current.share
        current.losses.append(record_loss(self.step, loss, self.place, factor))

    def record_mean(self, loss: torch.Tensor) -> None:
        """Show a loss of the whole batch to the observers."""
        record_loss(self.step, loss, self.step.where)
        for observer in self.step.observers:
            observer.record_graph(loss, (self.step.number, 0))

    def note_mean(self, loss: torch.Tensor, samples: int) -> None:
        """Note a mean over a batch of `samples` samples, to which the micro-batch contributes."""
        assert self.current is not None
        factor = self.microbatch.size / samples / self.current.share
        self.current.losses.append(loss.detach() * factor)

    def close(self, error: BaseException) -> None:
        """Leave the loop after an error; add a note that names the micro-batch to it.

        Raises:
            UsageError: Batch norm got a single sample; it replaces the error of torch.
        """
        if isinstance(self._iteration, Generator):
            self._iteration.close()  # leaves autocast, even if the user keeps the generator
        if self.current is None:
            return
        is_single = self.current.microbatch.size == 1
        if is_single and (explained := explain_batch_norm(error, self.place)) is not None:
            raise explained from error
        if not isinstance(error, LockstepError):  # whose messages name the place
            error.add_note(f"in {self.place}")
