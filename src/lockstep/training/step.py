"""One optimizer step, from top to bottom; it has the same outcome on every rank.

(1) compute     this rank's micro-batches                 executor: whole model, or stages
(2) exchange    the summary of the statuses of all ranks  rank_status
                with it the gradients of a small model
(3) check       may the step continue? nothing has changed so far
(4) reduce      gradients along the tree, over the ranks
(5) clip        by the norm of the whole gradient, which must be finite too
(6) merge       buffers
(7) update      the optimizer of shared parameters, on all ranks or none (`step_log`)
(8) commit      any other optimizer, the average of the weights, the scheduler

If float16 gradients overflowed, (7) and (8) do not update anything. An exception before (8) leaves
parameters, buffers and optimizer state as they were, unless the ranks have committed the step
in (7): then either the step is finished and a rank was lost, or the optimizer raised in the middle.
In an elastic run (1) to (7) are undone and repeated if a rank is lost
(`lockstep.elastic.membership`), unless all ranks have passed (7).
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.checkpoint.stop_request import StopRequest
from lockstep.comm.collectives import all_gather_bytes, all_reduce_messages
from lockstep.comm.native_module import compute_norms
from lockstep.data.microbatch import Batch
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.elastic.membership import membership
from lockstep.kernel import norm as gradient_norm
from lockstep.kernel.errors import (
    BufferMismatchError,
    GradientError,
    LockstepError,
    LossError,
    StateError,
    StoppedError,
    UsageError,
)
from lockstep.kernel.splitting import assign_nodes
from lockstep.kernel.tree import Node
from lockstep.launcher.device_choice import require_deterministic
from lockstep.model.batch_norm import check_batch_norm
from lockstep.model.buffers import Buffers
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.model.evaluation import Evaluation
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.side_effects import SideEffects, require_same_weights
from lockstep.model.static_shapes import static_shapes
from lockstep.model.step_context import StepContext
from lockstep.model.time_first import watch_time_first
from lockstep.pipeline.placement import Placement
from lockstep.record.rank_summary import Durations
from lockstep.training.history import StepResult
from lockstep.training.live_settings import LiveSettings
from lockstep.training.optimization import Optimization
from lockstep.training.rank_status import (
    PeakMemory,
    RankStatus,
    StatusPlace,
    StatusSummary,
    StepTrace,
    exchange_statuses,
    make_span_row,
    summarize,
)

__all__ = ["CommittedStep", "Executor", "OptimizerStep", "PreparedStep"]


class Executor(Protocol):
    """The interface of executors, which compute micro-batches: on a whole model, or in stages."""

    @property
    def side_effects(self) -> SideEffects:
        """The check of the side effects of forward."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank updates."""

    @property
    def owned_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank counts in the norm of the gradient."""

    @property
    def placement(self) -> Placement | None:
        """The placement of tensors on stages; None while this rank has all of them."""

    @property
    def is_ready(self) -> bool:
        """Whether steps can be computed: false until the model is partitioned into stages."""

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch of the current step has been computed."""

    def prepare(self, batch: Any) -> Any:
        """Prepare for the first step; return the batch, or the part that this rank needs."""

    def open(self, step: StepContext) -> AbstractContextManager[Any]:
        """Return the context in which a step is computed; it yields the object for manual loops."""

    def compute(self, batch: Any) -> None:
        """Compute this rank's part of a batch, inside the context of `open`."""

    def parts(self) -> Sequence[tuple[GradientReducer, Buffers]]:
        """Return the gradients and buffers of each part of the model on this rank."""

    def position(self) -> tuple[int, int] | None:
        """Return the micro-batch and the stage that are being computed; None between them."""

    def broadcast_tied_gradients(self, attempt: int) -> None:
        """Send the gradient sums of tied parameters to all stages that have them."""

    def reset(self) -> None:
        """Prepare for another attempt after a failed one."""

    def evaluate(self, model: nn.Module | None, batches: Iterable[Batch]) -> Evaluation:
        """Return the evaluation of the model, or of a copy of it with other weights."""


@dataclass(frozen=True)
class PreparedStep:
    """A step that every rank can commit: gradients and buffers are those of the whole batch.

    Attributes:
        step: The context of the step.
        status: The status of this rank.
        summary: The summary of the statuses of all ranks.
        norm: The 2-norm of the whole gradient before clipping.
        times: The times of `time.perf_counter` at which the exchange began, the statuses were
            exchanged, and gradients and buffers were reduced.
        updating: The duration of (7), in seconds.
    """

    step: StepContext
    status: RankStatus
    summary: StatusSummary
    norm: float
    times: tuple[float, float, float]
    updating: float = 0.0


@dataclass(frozen=True)
class CommittedStep:
    """A finished step.

    Attributes:
        step: The context of the step.
        result: The result of the step.
        summary: The summary of the statuses of all ranks.
        times: The times of this rank's `time.perf_counter` at which the statuses were exchanged,
            the gradients reduced, and the optimizer done.
    """

    step: StepContext
    result: StepResult
    summary: StatusSummary
    times: tuple[float, float, float]


@dataclass
class OptimizerStep:
    """The steps of one trainer, as functions of their phases.

    Attributes:
        parallel: The layout, the loss and the arithmetic.
        model: The model, or its compiled wrapper.
        executor: The executor, which computes the micro-batches.
        optimization: The optimizer, the scheduler and the average of the weights.
        settings: The settings that ranks compare in every step.
        max_grad_norm: The largest 2-norm of the whole gradient; None: no limit.
        trace: The tracing of some steps; None if nothing is recorded.
        stop: The request to stop, by a signal; None if signals are not handled.
    """

    parallel: ParallelContext
    model: nn.Module
    executor: Executor
    optimization: Optimization
    settings: LiveSettings
    max_grad_norm: float | None = None
    trace: StepTrace | None = None
    stop: StopRequest | None = None
    _memory: PeakMemory = field(default_factory=PeakMemory)
    _kept_buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def compute(self, step: StepContext, batch: Any) -> PreparedStep:
        """Do (1) with the trainer's own loss, and (2) to (7)."""
        with CollectiveCallGuard(lambda: f"rank {self.parallel.rank}, step {step.number}"):
            batch = self.executor.prepare(batch)
        # With loss weights, a single-sample micro-batch may have weight 0, and is not computed.
        checked = batch if self.parallel.loss_weight is None else None
        position = self.executor.position
        with self.computing(step), check_batch_norm(self.model, checked, position):
            self.executor.compute(batch)
        return self.prepare(step)

    @contextmanager
    def computing(self, step: StepContext) -> Iterator[Any]:
        """Compute (1) in the body; after an exception, restore buffers and gradients."""
        if (sharded := self.optimization.sharded) is not None:
            sharded.log.require_whole_state()
            if sharded.was_loaded:
                self.executor.side_effects.held.commit()
                sharded.was_loaded = False
        step.begun = time.perf_counter()
        step.is_traced = self.trace is not None and self.trace.covers(step.number)
        require_deterministic(self.parallel.device)
        if torch.get_num_threads() != self.parallel.threads:
            torch.set_num_threads(self.parallel.threads)
        self.executor.side_effects.begin(step.number)
        has_failed = True
        try:
            observing: AbstractContextManager[None] = nullcontext()
            watching: AbstractContextManager[None] = nullcontext()
            if step.number == 0:
                watching = watch_time_first(self.model, step, self.executor.position)
            if step.observer is not None:
                observing = step.observer.recording(step, self.executor.position)
            refusing = CollectiveCallGuard(partial(self._find_place, step))
            noting = self.executor.side_effects.watching()
            opened = self.executor.open(step)
            with static_shapes(self.model), noting, opened as loop, observing, watching, refusing:
                yield loop
            has_failed = step.error is not None
        except Exception as error:
            failure = self.executor.side_effects.failure
            if failure and not isinstance(error, LockstepError):
                raise StateError(f"{self._where(step)}: {failure}") from error
            raise
        finally:
            for gradients, buffers in self.executor.parts():
                buffers.restore()
                if has_failed:
                    gradients.clear()

    def _find_place(self, step: StepContext) -> str:
        """Return the place of the micro-batch that is being computed; "" between them."""
        position = self.executor.position()
        return "" if position is None else step.place(position[0])

    def prepare(self, step: StepContext) -> PreparedStep:
        """Do (2) to (7) after the micro-batches were computed.

        Raises:
            LossError: A loss is not finite.
            GradientError: The norm of the gradient is not finite.
            StateError: Forward made a forbidden write.
            DisagreementError: Ranks take different steps.
            BufferMismatchError: The results for a buffer cannot be merged.
            WorkError: The optimizer of shared parameters raised. All are raised on every rank.
        """
        try:
            return self._update_shared(self._prepare(step))
        except Exception:
            self.executor.reset()
            raise

    def commit(self, prepared: PreparedStep) -> CommittedStep:
        """Do (8), which is local."""
        try:
            return self._commit(prepared)
        except Exception:
            self.executor.reset()
            raise

    def undo(self) -> None:
        """Undo (1) to (6), complete or not, as if the step had not begun.

        An uncommitted (7) has written nothing, so it needs no undoing.
        """
        self._restore_buffers()
        for gradients, _ in self.executor.parts():
            gradients.clear()
        if self.executor.is_ready:
            self.executor.side_effects.undo()

    def _prepare(self, step: StepContext) -> PreparedStep:
        status = self._status(step)
        assert step.batch is not None
        leaves = step.batch.leaves
        begun = time.perf_counter()
        place = self._place(leaves)
        summary, messages = summarize(status, place), list[bytes]()
        if place.ranks > 1:
            summary, messages = exchange_statuses(
                summary, step.label, self.parallel.group, self._pack_gradients(step)
            )
        exchanged = time.perf_counter()
        step.is_agreed = True
        self._check(step, summary)
        nodes = assign_nodes(leaves, self.parallel.hosts)
        with step.in_phase("reduction"):
            self._reduce(step, status, nodes, summary, messages)
            norm = self._clip(step)
        self._keep_buffers()
        try:
            with step.in_phase("reduction"):
                self._merge_buffers(nodes, summary)
        except BaseException:
            self._restore_buffers()
            raise
        times = begun, exchanged, time.perf_counter()
        return PreparedStep(step, status, summary, norm, times)

    def _update_shared(self, prepared: PreparedStep) -> PreparedStep:
        """Do (7)."""
        sharded = self.optimization.sharded
        if sharded is None or self._is_skipped(prepared):
            return prepared
        started = time.perf_counter()
        try:
            with prepared.step.in_phase("optimizer"):
                self.optimization.step_shared(prepared.step.label.about)
        except BaseException:
            if not sharded.log.is_committed:
                self._restore_buffers()
            raise
        return replace(prepared, updating=time.perf_counter() - started)

    def _is_skipped(self, prepared: PreparedStep) -> bool:
        """Return whether float16 gradients overflowed."""
        return self.parallel.loss_scale is not None and not math.isfinite(prepared.norm)

    def _commit(self, prepared: PreparedStep) -> CommittedStep:
        step, status, summary = prepared.step, prepared.status, prepared.summary
        assert step.batch is not None
        begun, exchanged, reduced = prepared.times
        scale, is_skipped = self.parallel.loss_scale, self._is_skipped(prepared)
        rate = self.optimization.rate
        started = time.perf_counter()  # after the barrier of an elastic run
        if not is_skipped:
            with step.in_phase("optimizer"):
                self.optimization.step()
        updated = reduced + prepared.updating + time.perf_counter() - started
        self._kept_buffers = []
        self.executor.side_effects.held.commit()
        step.is_agreed = False
        arrived = status.data + status.compute + status.idle
        durations = Durations(arrived, exchanged - begun, reduced - exchanged, updated - reduced)
        result = StepResult(
            step=step.number,
            epoch=step.batch.epoch,
            loss=summary.sum_losses(),
            samples=step.batch.size,
            metrics=summary.average_metrics(),
            lr=rate,
            seconds=arrived + updated - begun,
            ranks=summary.usage.compute_rows(durations),
            rank_summary=summary.usage.summarize_times(durations),
            norm=prepared.norm,
            loss_scale=None if scale is None else scale.value,
            is_skipped=None if scale is None else is_skipped,
            losses=summary.list_losses(),
            batch=step.batch.identity.samples or step.batch.identity.checksum or None,
        )
        if scale is not None:
            scale.update(is_skipped)
        return CommittedStep(step, result, summary, (exchanged, reduced, updated))

    # --- (2) exchange --------------------------------------------------------------------------

    def _status(self, step: StepContext) -> RankStatus:
        """Return the status of this rank: its micro-batches, or its failure."""
        settings = self.settings.finish()
        effects = self.executor.side_effects
        if step.stopped:
            return RankStatus(
                stopped=step.stopped,
                side_effect=effects.failure,
                batch=step.label.batch,
                settings=settings,
            )
        if step.batch is None or not self.executor.is_complete:
            raise UsageError(
                "the step was left before its last micro-batch: iterate over all of "
                "step.microbatches(batch) inside `with trainer.manual_step() as step`"
            )
        compute = time.perf_counter() - step.begun - step.idle
        effects.finish()
        place = self._where(step)
        side_effect = effects.failure or self.optimization.find_foreign_code()
        weights = effects.summary
        if step.observer is not None and not step.stops_at_refusals:
            # lockstep check continues, to compare the layouts
            step.observer.record_refusal(side_effect)
            side_effect = weights = ""
        is_alone = self.parallel.replicas == 1
        results, skipped = [each.result() for each in step.computed], []
        if results and len(results) < len(step.batch.microbatches):
            known = {each.leaf for each in results}
            skipped = [each.index for each in step.batch.microbatches if each.index not in known]
        return RankStatus(
            microbatches=results,
            skipped=skipped,
            buffers=[buffers.hash_results(is_alone) for _, buffers in self.executor.parts()],
            compute=compute,
            data=step.batch.seconds,
            memory=self._memory.read(),
            gradients=[gradients.used_parameter_mask() for gradients, _ in self.executor.parts()],
            warnings=[*step.warnings, *(f"{place}: {each}" for each in effects.warnings)],
            failure=step.failure,
            side_effect=side_effect,
            weights=weights,
            settings=settings,
            writer=effects.held.writer,
            idle=step.idle,
            batch=step.label.batch,
            is_checkpoint_due=step.is_checkpoint_due,
            stop=self.stop.signal if self.stop is not None else "",
            admits=step.admits,
            spans=[make_span_row(span, step.begun) for span in step.spans],
            begun=self.trace.rank0_time(step.begun) if self.trace and step.is_traced else 0.0,
        )

    def _pack_gradients(self, step: StepContext) -> bytes:
        """Return the gradients that are sent with the status, if the model is small."""
        if step.stopped or self.parallel.stages > 1:  # fewer ranks add than exchange statuses
            return b""
        return b"".join(gradients.pack() for gradients, _ in self.executor.parts())

    # --- (3) check -----------------------------------------------------------------------------

    def _check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise, on every rank, the error that prevents the step, if there is one."""
        if summary.batch is None:
            step.label.require_same(self.parallel.group)
        is_stopped = isinstance(step.error, StoppedError) or self.executor.side_effects.failure
        if step.error is not None and not is_stopped:
            raise step.error
        self._check_writers(step, summary.writers)
        if summary.failure is not None:
            rank, kind, sentence = summary.failure
            if kind == "stopped":
                raise StoppedError(f"rank {self.parallel.rank} stopped because {sentence}")
            raise (GradientError if kind == "failure" else StateError)(
                f"rank {rank}, step {step.number}: {sentence}"
            )
        if summary.settings is None:
            self.settings.require_same(step.number)
        if None in summary.weights.values():
            checksums = self.executor.side_effects.checksums()
            require_same_weights(checksums, step.label.about, self.parallel.group)
        if (found := summary.non_finite) is not None:
            place = f"rank {found.rank}, step {step.number}, micro-batch {found.leaf}"
            advice = ""
            if math.isnan(found.loss) and found.ignores_targets:
                loss = "torch.nn.CrossEntropyLoss()" if self.parallel.loss is None else "loss"
                advice = (
                    " (if it ignores all targets of the micro-batch, pass loss_weight="
                    f"ls.target_weight({loss}) to the trainer)"
                )
            error = LossError(f"{place}: the loss is {found.loss}{advice}")
            error.microbatch = found.leaf
            raise error
        if any(each.is_refused for reports in summary.buffers.values() for each in reports):
            self._refuse_buffers(step, summary)

    def _refuse_buffers(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise, on every rank, the error about a buffer that cannot be merged."""
        reports = summary.buffers[str(self.parallel.position)]
        pairs = zip(self.executor.parts(), reports, strict=True)
        reasons = [buffers.describe_refusal(report) for (_, buffers), report in pairs]
        mine = json.dumps(max(reasons, default=(False, ""))).encode()
        about = f"comparing buffers {step.label.about}"
        messages = [mine] if self._place(0).ranks == 1 else []
        messages = messages or all_gather_bytes(mine, about, self.parallel.group)
        _, reason = max(tuple(json.loads(each)) for each in messages)
        raise BufferMismatchError(f"step {step.number}: {reason}")

    def _check_writers(self, step: StepContext, writers: Sequence[tuple[int, str]]) -> None:
        """Raise StateError if shared parameters were written by several ranks, or by unknown ones.

        One rank may write them. The others see new values without a write of their own.
        """
        known = [writer for writer in writers if writer[0] >= 0]
        if writers and len(known) != 1:
            by = f"by ranks {known[0][0]} and {known[1][0]}" if known else "through .data"
            raise StateError(
                f"{self._where(step)}: the parameter {writers[-1][1]} was written {by} after the "
                'step before, and with storage="shared" the ranks have one copy of it: write it on '
                "one rank, between two barriers and not through .data, call "
                "trainer.load_state_dict() on every rank, or train with replicated storage"
            )

    def _where(self, step: StepContext) -> str:
        return f"rank {self.parallel.rank}, step {step.number}"

    # --- (4) reduce and (5) clip ---------------------------------------------------------------

    def _reduce(
        self,
        step: StepContext,
        status: RankStatus,
        nodes: Sequence[Sequence[Node]],
        summary: StatusSummary,
        messages: Sequence[bytes],
    ) -> None:
        """Reduce the gradients to sums over all micro-batches, in `.grad`."""
        masks = summary.gradients[str(self.parallel.position)]
        for (gradients, _), mask in zip(self.executor.parts(), masks, strict=True):
            gradients.reduce(nodes, mask, messages)
        self.executor.broadcast_tied_gradients(step.attempt.number)
        if step.observer is not None:
            losses = {each.leaf: each.loss for each in status.microbatches}
            step.observer.record_reduction(losses)

    def _clip(self, step: StepContext) -> float:
        """Clip the gradients to the limit, and return their norm before clipping.

        The norm is only non-finite if a smaller loss scale can be tried.
        """
        scale, sharded = self.parallel.loss_scale, self.optimization.sharded
        parameters = self.executor.parameters
        present = _stored_gradients(parameters) if sharded is None else sharded.local_gradients()
        if scale is not None:
            scale.unscale_(present)
        norm = self._compute_norm(step, present)
        gradient_norm.clip_gradients_(present, norm, self.max_grad_norm)
        if not math.isfinite(norm) and (scale is None or not scale.can_decrease):
            at_scale = "" if scale is None else f" with a loss scale of {scale.value:g}"
            raise GradientError(f"step {step.number}: the norm of the gradient is {norm}{at_scale}")
        return norm

    def _compute_norm(self, step: StepContext, present: Sequence[torch.Tensor]) -> float:
        """Return the norm of the whole gradient, of which this rank has the tensors `present`."""
        replica, replicas = self.parallel.replica, self.parallel.replicas
        owners, counted = self.executor.owned_parameters, present
        if self.optimization.sharded is not None:
            replica, replicas = 0, 1
        elif owners is not self.executor.parameters:  # stages
            counted = _stored_gradients(owners)
        elif sum(each.numel() for each in present) < gradient_norm.SHARED_ELEMENTS:
            squares = gradient_norm.compute_squares(present, measure=compute_norms)
            return gradient_norm.compute_norm(squares)
        squares = gradient_norm.compute_squares(counted, replica, replicas, compute_norms)
        sums = all_reduce_messages(
            gradient_norm.compute_partial_sums(squares),
            gradient_norm.merge_partial_sums,
            lambda values: array("d", values).tobytes(),
            lambda message: array("d", message).tolist(),
            f"at the norm of the gradient {step.label.about}",
            self.parallel.group,
        )
        return gradient_norm.compute_norm(sums)

    # --- (6) merge -----------------------------------------------------------------------------

    def _merge_buffers(self, nodes: Sequence[Sequence[Node]], summary: StatusSummary) -> None:
        reports = summary.buffers[str(self.parallel.position)]
        for (_, buffers), report in zip(self.executor.parts(), reports, strict=True):
            if not report.hashes:  # no buffers, or nothing computed
                continue
            buffers.merge(report, nodes, summary.leaves, self.parallel.peers)

    def _keep_buffers(self) -> None:
        """Copy the buffers, if a step can still be undone after they are merged."""
        sharded = self.optimization.sharded
        if sharded is not None:
            sharded.log.is_committed = False
        if sharded is not None or membership() is not None:
            self._kept_buffers = [
                (tensor, tensor.clone())
                for _, buffers in self.executor.parts()
                for tensor in buffers.tensors()
            ]

    def _restore_buffers(self) -> None:
        """Restore the buffers from the copies of `_keep_buffers`, if there are any."""
        for tensor, kept in self._kept_buffers:
            tensor.copy_(kept)
        self._kept_buffers = []

    def _place(self, leaves: int) -> StatusPlace:
        """Return the place of this rank among those that exchange their statuses."""
        parallel = self.parallel
        ranks = parallel.replicas * parallel.stages
        return StatusPlace(parallel.rank, ranks, parallel.replica, parallel.position, leaves)


def _stored_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the stored elements of the existing gradients."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    return [gradient_norm.stored_values(each) for each in gradients]
