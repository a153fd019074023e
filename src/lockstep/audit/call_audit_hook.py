"""The audit of manual steps and of pipeline stages: the hook of `CallAudit`.

The micro-batches of a manual step are computed by the script, and those of a pipeline by several
ranks, so neither can be computed again as a whole. Each rank repeats its own part: the call of the
model, or its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from lockstep.audit.audit_config import AuditConfig
from lockstep.audit.call_audit import CallAudit, raise_by_name
from lockstep.kernel.rank_status import StatusSummary
from lockstep.kernel.step_context import Position, StepContext, StepObserver
from lockstep.kernel.step_hooks import CommittedStep, RepeatStep, StepHook
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.watched_calls import WatchedCalls

__all__ = ["CallAuditHook"]


class CallAuditHook(StepHook):
    """The hook that audits the calls of a rank, in steps whose micro-batches cannot be repeated.

    Args:
        config: The settings.
        parallel: The layout.
        position: A function that returns the micro-batch and the stage that are being computed.
        find_calls: A function that returns the calls of the current step that can be watched, on
            this rank.
        record: A function that records a finding, given its fields.
        who: What calls the model of a step without stages, in messages.
    """

    name = "calls"

    def __init__(
        self,
        config: AuditConfig,
        parallel: ParallelContext,
        position: Position,
        find_calls: Callable[[], Sequence[WatchedCalls]],
        record: Callable[[Mapping[str, Any]], None],
        who: str = "trainer.manual_step()",
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._position = position
        self._find_calls = find_calls
        self._record = record
        self._who = who
        self.first, self.every = config.limits
        self._audits: dict[tuple[str, ...], CallAudit] = {}
        self._found: list[Mapping[str, Any]] = []

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None] | None:
        """Watch the calls of an audited step, and repeat one of them at the end."""
        self._found = []
        is_due = self._config.is_audited(step.number)
        is_due = is_due and (batch is None or self._parallel.stages > 1)
        return self._auditing(step) if is_due else None

    @contextmanager
    def _auditing(self, step: StepContext) -> Iterator[None]:
        parts = [(calls, self._find_audit(step, calls)) for calls in self._find_calls()]
        observer = _MicrobatchEnds(step, parts, self._position)
        step.observers.append(observer)
        with ExitStack() as stack:
            # They refer to each other, and to the batch, until garbage is collected.
            stack.callback(step.observers.remove, observer)
            for calls, audit in parts:
                audit.begin_step(step.number, [])
                stack.enter_context(calls.watch(audit.begin_call, audit.end_call))
            yield
        for calls, audit in parts:
            if step.failure is not None:
                audit.leave_out()  # the other ranks of a sharded model ask this one nevertheless
            if (failure := audit.find_failure(calls.buffers.preserve)) is not None:
                self._found.append({"error": [type(failure).__name__, str(failure)]})

    def _find_audit(self, step: StepContext, calls: WatchedCalls) -> CallAudit:
        def say(message: str, finding: Mapping[str, Any] | None) -> None:
            if finding is None:
                step.warn(step.where, message)
            else:
                self._found.append(finding)

        name = tuple(calls.modules)
        rank = self._parallel.rank
        who = f"stage {calls.stage}" if self._parallel.stages > 1 else self._who
        if name not in self._audits:
            call = (calls.call, calls.modules, calls.scopes)
            position = self._position
            self._audits[name] = CallAudit(self._config, rank, *call, position, who, calls.sharded)
        audit = self._audits[name]
        audit.say = say
        audit.is_repeatable = step.is_repeatable
        return audit

    def status(self, step: StepContext) -> list[Mapping[str, Any]]:
        """Return what this rank has found."""
        return self._found

    def merge(
        self, left: list[Mapping[str, Any]], right: list[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Return what two ranges of ranks have found."""
        return left + right

    def check(self, step: StepContext, summary: StatusSummary) -> None:
        """Raise the first error of a rank, or have the step computed again after a wrong result.

        Raises:
            StateError: A call depends on something else than its inputs.
            WorkError: A processor is faulty.
            RepeatStep: Gradients contain a wrong result.
        """
        entries = summary.hooks[self.name] if summary.failure is None else []
        findings = [entry for entry in entries if "error" not in entry]
        errors = [entry["error"] for entry in entries if "error" in entry]
        is_wrong = any(finding["corrected"] for finding in findings)
        for finding in findings if errors or is_wrong else ():
            self._record(finding)
        if errors:
            raise_by_name(*errors[0])
        if is_wrong:
            raise RepeatStep(f"{step.where}: the step is computed again, after a wrong result")

    def report(self, committed: CommittedStep) -> None:
        """Record the findings of all ranks."""
        for finding in committed.summary.hooks[self.name]:
            self._record(finding)


class _MicrobatchEnds(StepObserver):
    """Chooses the micro-batches that are repeated, and notes their results."""

    observes_microbatches = True

    def __init__(
        self,
        step: StepContext,
        parts: Sequence[tuple[WatchedCalls, CallAudit]],
        position: Position,
    ) -> None:
        self._step = step
        self._parts = parts
        self._position = position
        self._has_begun = False
        self._losses = 0

    def begin_microbatch(self) -> None:
        """Choose the micro-batches, now that those that are computed are known."""
        batch = self._step.batch
        self._losses = 0
        assert batch is not None
        own = [part.index for part in batch.microbatches if part.index in self._step.shares]
        for calls, audit in self._parts:
            if not self._has_begun:
                audit.begin_step(self._step.number, own)
            if calls.obstacle:
                audit.refuse(calls.obstacle)
        self._has_begun = True

    def record_loss(self, loss: torch.Tensor) -> None:
        """Refuse several backward passes of a manual step's micro-batch."""
        self._losses += 1
        if self._losses > 1 and self._step.parallel.stages == 1:
            for _, audit in self._parts:
                audit.refuse("backward is called several times per micro-batch")

    def record_microbatch(
        self,
        microbatch: int,
        gradients: Mapping[str, int],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Note the end of the micro-batch of a stage."""
        is_of_script = self._step.parallel.stages == 1
        for calls, audit in self._parts:
            if self._position() == (microbatch, calls.stage):
                audit.end_microbatch(calls.input_gradients(), is_of_script)
