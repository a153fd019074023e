"""One optimizer step, from top to bottom; it has the same outcome on every rank.

(1) compute     this rank's micro-batches                 executor: whole model, or stages
(2) exchange    the summary of the statuses of all ranks  rank_status
                with it the gradients of a small model
(3) check       may the step continue? nothing has changed so far
(4) reduce      gradients along the tree, over the ranks
(5) clip        by the norm of the whole gradient, which must be finite too
(6) merge       buffers
(7) update      the optimizer of shared parameters, on all ranks or none (`shared_parameters.py`)
(8) commit      any other optimizer, the average of the weights, the scheduler

If float16 gradients overflowed, (7) and (8) do not update anything. An exception before (8) leaves
parameters, buffers and optimizer state as they were, unless the ranks have committed the step
in (7): then a rank was lost while they wrote, or the optimizer raised.
In an elastic run (1) to (7) are undone and repeated if a rank is lost, unless all ranks have
passed (7). What is not part of every step is a hook (`lockstep.kernel.step_hooks`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.kernel import norm as gradient_norm
from lockstep.kernel.errors import GradientError
from lockstep.kernel.exact_sum import add_over_ranks
from lockstep.kernel.layout import StepLayout
from lockstep.kernel.parts import Executor, Part, Update
from lockstep.kernel.rank_status import RankStatus, StatusSummary, make_status, summarize
from lockstep.kernel.step_checks import raise_failure, raise_own_error, refuse_buffers
from lockstep.kernel.step_context import NOTHING, StepContext, StepLabel
from lockstep.kernel.step_hooks import CommittedStep, StepHook, StepResult

__all__ = ["OptimizerStep", "PreparedStep", "find_active"]


StatusExchange = Callable[
    [StatusSummary, Mapping[str, StepHook], StepLabel, bytes], tuple[StatusSummary, Sequence[bytes]]
]
"""A function of this rank's summary, the hooks that have values in it, and packed gradients.

It returns the summary of all ranks, and messages that contain the gradients of all ranks.
"""


class PreparedStep(NamedTuple):
    """A step that every rank can commit: gradients and buffers are those of the whole batch.

    Attributes:
        step: The context of the step.
        summary: The summary of the statuses of all ranks.
        norm: The 2-norm of the whole gradient before clipping.
    """

    step: StepContext
    summary: StatusSummary
    norm: float


@dataclass
class OptimizerStep:
    """The steps of one trainer, as functions of their phases.

    Attributes:
        parallel: The layout, the loss and the arithmetic.
        executor: The executor, which computes the micro-batches.
        optimization: The optimizer, the scheduler and the average of the weights.
        exchange_statuses: The exchange of (2).
        hooks: What else takes part in a step, in this order.
        max_grad_norm: The largest 2-norm of the whole gradient; None: no limit.
        is_repeatable: Whether a step can be undone after its buffers are merged.
        squares: Returns the squares of some blocks of gradients, as `compute_squares`.
    """

    parallel: StepLayout
    executor: Executor
    optimization: Update
    exchange_statuses: StatusExchange
    hooks: Sequence[StepHook] = ()
    max_grad_norm: float | None = None
    is_repeatable: bool = False
    squares: Callable[..., list[float]] = gradient_norm.compute_squares
    _active: list[StepHook] = field(default_factory=list)  # the hooks of the current step
    # Those of them that override a method, by its name.
    _overriding: dict[str, list[StepHook]] = field(default_factory=lambda: defaultdict(list))
    _parts: Sequence[Part] = ()  # the parts of the model in it
    _kept_buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def compute(self, step: StepContext, batch: Any) -> PreparedStep:
        """Do (1) with the trainer's own loss, and (2) to (7)."""
        with self.computing(step, batch) as loop:
            loop.compute(batch)
        return self.prepare(step)

    @contextmanager
    def computing(self, step: StepContext, batch: Any = None) -> Iterator[Any]:
        """Compute (1) in the body; after an exception, restore buffers and gradients."""
        active = find_active(self.hooks, step.number)
        if active != self._active:
            self._active = active
            self._overriding = defaultdict(list)
            for hook in active:
                for event in hook.events:
                    self._overriding[event].append(hook)
        step.times.begun = time.perf_counter()
        outer = list[Any]()
        inner = list[Any]()
        for hook in self._overriding["begin"]:
            if (context := hook.begin(step, batch)) is not None:
                (outer if hook.is_outermost else inner).append(context)
        has_failed = True
        try:
            with _enter(outer), self.executor.open(step) as loop, _enter(inner):
                yield loop
            has_failed = step.failure is not None and step.failure.error is not None
        finally:
            self._parts = self.executor.parts
            for gradients, buffers in self._parts:
                if buffers.slots:
                    buffers.restore()
                if has_failed:
                    gradients.clear()

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
        shared = self.optimization.shared
        try:
            parts = self._parts
            status = self._make_status(step, parts)
            summary, messages = self._exchange(step, status, parts)
            self._check(step, summary, parts)
            if self.is_repeatable:
                self._keep_buffers(parts)
            with step.in_phase("reduction") if step.observers else NOTHING:
                self._reduce(step, status, summary, parts, messages)
                norm = self._clip(step)
                self._merge_buffers(summary, parts)
            step.times.reduced = time.perf_counter()
            step.times.updated = step.times.reduced
            prepared = PreparedStep(step, summary, norm)
            if shared is not None and math.isfinite(norm):
                with step.in_phase("optimizer"):
                    self.optimization.step_shared(step.label.about)
                step.times.updated = time.perf_counter()
            return prepared
        except BaseException as error:
            if shared is None or not shared.is_committed:
                self._restore_buffers()
            if isinstance(error, Exception):
                self.executor.reset()
            raise

    def commit(self, prepared: PreparedStep) -> CommittedStep:
        """Do (8), which is local."""
        step, summary, norm = prepared
        # Without a loss scale, a norm that is not finite has been an error.
        is_skipped = not math.isfinite(norm)
        scale = self.parallel.loss_scale
        rate = self.optimization.rate
        started = time.perf_counter()  # after the barrier of an elastic run
        if not is_skipped:
            with step.in_phase("optimizer") if step.observers else NOTHING:
                self.optimization.step()
        for hook in self._overriding["commit"]:
            hook.commit(step)
        step.times.updated += time.perf_counter() - started
        measured: dict[str, Any] = {}
        for hook in self._overriding["measure"]:
            measured |= hook.measure(step, summary.hooks[hook.name])
        step.attempt.is_agreed = False
        self._kept_buffers = []
        assert step.batch is not None
        result = StepResult(
            step=step.number,
            epoch=step.batch.epoch,
            loss=summary.sum_losses(),
            samples=step.batch.size,
            metrics=summary.average_metrics() if summary.metrics else {},
            lr=rate,
            norm=norm,
            loss_scale=None if scale is None else scale.value,
            is_skipped=None if scale is None else is_skipped,
            losses=summary.list_losses(),
            batch=step.batch.identity.samples or step.batch.identity.checksum or None,
            **measured,
        )
        if scale is not None:
            scale.update(is_skipped)
        return CommittedStep(step, summary, result)

    def report(self, committed: CommittedStep) -> None:
        """Report a step that is committed and counted."""
        for hook in self._overriding["report"]:
            hook.report(committed)

    def undo(self) -> None:
        """Undo (1) to (6), complete or not, as if the step had not begun.

        An uncommitted (7) has written nothing, so it needs no undoing.
        """
        self._restore_buffers()
        for gradients, _ in self._parts:
            gradients.clear()
        for hook in self._overriding["undo"]:
            hook.undo()

    # --- (2) exchange --------------------------------------------------------------------------

    def _make_status(self, step: StepContext, parts: Sequence[Part]) -> RankStatus:
        """Return the status of this rank: its micro-batches, or its failure."""
        step.times.computed = time.perf_counter()
        values: dict[str, Any] = {}
        for hook in self._overriding["status"]:
            values[hook.name] = hook.status(step)
        return make_status(step, parts, values)

    def _exchange(
        self, step: StepContext, status: RankStatus, parts: Sequence[Part]
    ) -> tuple[StatusSummary, Sequence[bytes]]:
        """Return the summary of the statuses of all ranks, and the messages with gradients."""
        parallel = self.parallel
        ranks = parallel.replicas * parallel.stages
        assert step.batch is not None
        summary = summarize(status, parallel, step.batch.leaves)
        messages: Sequence[bytes] = ()
        step.times.arrived = time.perf_counter()
        if ranks > 1:
            gradients = b""
            # Fewer ranks add than exchange statuses if there are stages.
            if parallel.stages == 1 and not step.is_stopped:
                gradients = b"".join(sums.pack() for sums, _ in parts)
            hooks = {hook.name: hook for hook in self._active if hook.name in status.hooks}
            summary, messages = self.exchange_statuses(summary, hooks, step.label, gradients)
        step.times.exchanged = time.perf_counter()
        step.attempt.is_agreed = True
        return summary, messages

    # --- (3) check -----------------------------------------------------------------------------

    def _check(self, step: StepContext, summary: StatusSummary, parts: Sequence[Part]) -> None:
        """Raise, on every rank, the error that prevents the step, if there is one."""
        if summary.batch is None:
            step.require_same_batch()
        if step.failure is not None:
            raise_own_error(step)
        for hook in self._overriding["check"]:
            hook.check(step, summary)
        if summary.failure is not None or summary.non_finite is not None:
            raise_failure(step, summary)
        if any(report.hashes for reports in summary.buffers.values() for report in reports):
            refuse_buffers(step, parts, summary)

    # --- (4) reduce and (5) clip ---------------------------------------------------------------

    def _reduce(
        self,
        step: StepContext,
        status: RankStatus,
        summary: StatusSummary,
        parts: Sequence[Part],
        messages: Sequence[bytes],
    ) -> None:
        """Reduce the gradients to sums over all micro-batches, in `.grad`."""
        masks = summary.gradients[str(self.parallel.position)]
        for (gradients, _), mask in zip(parts, masks, strict=True):
            gradients.reduce(mask, messages)
        if self.parallel.stages > 1:
            self.executor.broadcast_tied_gradients(step.attempt.number)
        for observer in step.observers:
            losses = {leaf: loss for leaf, _, _, loss, _ in status.microbatches if loss is not None}
            observer.record_reduction(losses)

    def _clip(self, step: StepContext) -> float:
        """Clip the gradients to the limit, and return their norm before clipping.

        The norm is only non-finite if a smaller loss scale can be tried, here or by the script.
        """
        scale = self.parallel.loss_scale
        shared = self.optimization.shared
        parameters = self.executor.parameters
        present = _stored_gradients(parameters) if shared is None else shared.local_gradients()
        if scale is not None:
            scale.unscale_(present)
        norm = self._compute_norm(step, present)
        if self.max_grad_norm is not None:
            gradient_norm.clip_gradients_(present, norm, self.max_grad_norm)
        may_overflow = step.may_overflow if scale is None else scale.can_decrease
        if not (may_overflow or math.isfinite(norm)):
            at_scale = "" if scale is None else f" with a loss scale of {scale.value:g}"
            raise GradientError(f"step {step.number}: the norm of the gradient is {norm}{at_scale}")
        return norm

    def _compute_norm(self, step: StepContext, present: Sequence[torch.Tensor]) -> float:
        """Return the norm of the whole gradient, of which this rank has the tensors `present`."""
        replica = self.parallel.replica
        replicas = self.parallel.replicas
        owners = self.executor.owned_parameters
        counted = present
        if self.optimization.shared is not None:
            replica = 0
            replicas = 1
        elif owners is not self.executor.parameters:  # stages
            counted = _stored_gradients(owners)
        elif sum([gradient.numel() for gradient in present]) < gradient_norm.SHARED_ELEMENTS:
            return gradient_norm.compute_norm(self.squares(present))
        squares = self.squares(counted, replica, replicas)
        about = f"at the norm of the gradient {step.label.about}"
        sums = add_over_ranks(squares, self.parallel.messages, about)
        return gradient_norm.compute_norm(sums)

    # --- (6) merge, (7) update and (8) commit --------------------------------------------------

    def _merge_buffers(self, summary: StatusSummary, parts: Sequence[Part]) -> None:
        reports = summary.buffers[str(self.parallel.position)]
        for (_, buffers), report in zip(parts, reports, strict=True):
            if report.hashes:  # none without buffers, or if nothing was computed
                nodes = self.parallel.assign_nodes(summary.leaves)
                exchange = self.parallel.make_buffer_exchange() if len(nodes) > 1 else None
                buffers.merge(report, nodes, summary.leaves, exchange)

    def _keep_buffers(self, parts: Sequence[Part]) -> None:
        """Copy the buffers, since the step can still be undone after they are merged."""
        if self.optimization.shared is not None:
            self.optimization.shared.is_committed = False
        self._kept_buffers = [
            (tensor, tensor.clone()) for _, buffers in parts for tensor in buffers.tensors()
        ]

    def _restore_buffers(self) -> None:
        """Restore the buffers from the copies of `_keep_buffers`, if there are any."""
        for tensor, kept in self._kept_buffers:
            tensor.copy_(kept)
        self._kept_buffers = []


def find_active(hooks: Sequence[StepHook], number: int) -> list[StepHook]:
    """Return the hooks that take part in step `number`."""
    return [
        hook for hook in hooks if hook.every == 1 or number < hook.first or not number % hook.every
    ]


def _enter(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return a context that enters some contexts in order."""
    if len(contexts) < 2:
        return contexts[0] if contexts else NOTHING
    return _enter_all(contexts)


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _stored_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the stored elements of the existing gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
