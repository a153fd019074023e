"""The steps of a trainer as operations, which every rank prepares and then commits.

begin      the number of the attempt
prepare    (1) to (7) of `step.py`; undone and repeated if a rank is lost
commit     (8), and the step is counted
report     the hooks: checkpoints, the record, callbacks, an observer
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn

from lockstep.compiled_wrapper import unwrap
from lockstep.kernel.errors import (
    GradientError,
    LayoutError,
    LockstepError,
    LossError,
    UsageError,
    WorkError,
)
from lockstep.kernel.step import OptimizerStep, PreparedStep
from lockstep.kernel.step_context import Attempt, StepContext
from lockstep.kernel.step_hooks import CommittedStep, RepeatStep
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.model.collective_calls import CollectiveCallGuard

__all__ = ["OpenStep", "StepOperation"]


class StepRun(Protocol):
    """The run that steps belong to, with the state that they change."""

    @property
    def member(self) -> Any:
        """This process as a member of an elastic run; None outside of one."""

    @property
    def state(self) -> Any:
        """The state of the training: its executor, position, layout and history."""

    @property
    def record(self) -> Any:
        """The record of the run."""

    @property
    def safe_points(self) -> Any:
        """The places where the script can be continued, and the work there."""

    def require_repeatable_step(self) -> None:
        """Raise UsageError for a step that a resumed script would have to repeat."""


_open_steps: WeakSet[OpenStep] = WeakSet()
"""The steps of scripts that are open in this process. One that a script has dropped before its end
leaves with its modules, whose ids may later be those of others."""


class StepOperation:
    """The steps of one trainer, undone and repeated if a rank of an elastic run is lost.

    Args:
        optimizer_step: The phases of a step.
        model: The model, or its compiled wrapper.
        run: The run, whose checkpoints are abandoned if training fails.

    Attributes:
        optimizer_step: The phases of a step.
        member: This process as a member of an elastic run; None outside of one.
        modules: The ids of the modules that a step calls.
    """

    def __init__(self, optimizer_step: OptimizerStep, model: nn.Module, run: StepRun) -> None:
        self.optimizer_step = optimizer_step
        self.member: Any = run.member
        self._run = run
        self._state = run.state
        self._position = run.state.position
        self._parallel = run.state.parallel
        modules = self._parallel.modules_with(model).values()
        self.modules = {id(unwrap(module)) for module in modules}

    @property
    def number(self) -> int:
        """The number of the next step."""
        steps: int = self._position.steps
        return steps

    @property
    def is_logged(self) -> bool:
        """Whether another process may continue the script between two batches."""
        logged: bool = self._run.safe_points.is_logged
        return logged

    @property
    def where(self) -> str:
        """This rank, for messages."""
        return f"rank {self._parallel.rank}"

    def take(self, batch: Any) -> float:
        """Take one step on a batch, and return its loss."""
        if _open_steps:
            self.require_closed("step()")
        if self.member is None:
            committed = self.commit(self._prepare(batch))
        else:
            prepare = partial(self._prepare, batch)
            committed = self.member.run(prepare, self.commit, self.optimizer_step.undo, self.keep)
        self.report(committed)
        return committed.result.loss

    def keep(self, is_asked: bool = True) -> bool:
        """Keep what this rank has computed of a step in which a rank was lost.

        Args:
            is_asked: Whether the script computes only what is missing.

        Returns:
            Whether it is kept, and not computed again. Ranks that share the state of the optimizer,
            or that have a part of the model, are replaced.
        """
        parallel = self._parallel
        has_all = parallel.stages == 1 and not parallel.is_sharded
        is_kept = has_all and self.optimizer_step.optimization.shared is None and is_asked
        if has_all:
            self._state.executor.keep(is_kept)
        return is_kept

    def _prepare(self, batch: Any) -> PreparedStep:
        while True:
            step = self.begin()
            try:
                given = batch if self._state.executor.is_ready else self._partition(step, batch)
                return self.optimizer_step.compute(step, given)
            except RepeatStep:
                self.optimizer_step.undo()
            except BaseException as error:
                self.note_failure(step, error)
                raise

    def _partition(self, step: StepContext, batch: Any) -> Any:
        """Partition the model into stages with the first batch; return this rank's part of it."""
        with CollectiveCallGuard(lambda: step.where):
            return self._state.executor.prepare(batch)

    def require_closed(self, call: str) -> None:
        """Raise UsageError if micro-batches of one of the modules are being computed."""
        computing = (opened for opened in _open_steps if opened.prepared is None)
        if any(opened.modules & self.modules for opened in computing):
            raise UsageError(
                f"trainer.{call} was called inside of `with trainer.manual_step()`, where the "
                "model has the buffers of this rank's micro-batch: call it after the block"
            )

    def require_whole_model(self) -> None:
        """Raise LayoutError if the script cannot compute micro-batches itself."""
        if self._parallel.stages > 1:
            raise LayoutError(
                "a manual step needs the whole model on every rank: with stages, call "
                "trainer.step(batch), or train without pipeline="
            )
        self._run.require_repeatable_step()

    @contextmanager
    def opening(self, *, is_repeatable: bool) -> Iterator[Any]:
        """Return the context of a step whose micro-batches the body computes, with its loop.

        Args:
            is_repeatable: As for `open`.
        """
        self.require_closed("manual_step()")
        opened = self.open(is_repeatable=is_repeatable)
        try:
            yield opened.loop
        except BaseException as error:
            opened.fail(error)
            return
        if opened.prepare():
            opened.loop.result = opened.commit().result
            opened.report()

    def open(self, *, is_repeatable: bool, keeps_work: bool = False) -> OpenStep:
        """Begin an attempt at the next step, whose micro-batches the script computes.

        Args:
            is_repeatable: Whether the script computes the micro-batches again if the step is not
                prepared, such as after a processor has computed wrong. Otherwise this process is
                replaced if a rank is lost.
            keeps_work: Whether the script computes only what is missing after a rank was lost.
        """
        return OpenStep(self, is_repeatable=is_repeatable, keeps_work=keeps_work)

    def begin(self) -> StepContext:
        """Begin an attempt at the next step."""
        position = self._position
        last = position.attempt
        position.attempt = Attempt(last.trainer, position.steps, last.number + 1, last.failure)
        return StepContext(position.attempt, self._parallel)

    def commit(self, prepared: PreparedStep) -> CommittedStep:
        """Commit a step that every rank has prepared, and count it."""
        try:
            committed = self.optimizer_step.commit(prepared)
        except BaseException as error:
            self.note_failure(prepared.step, error)
            raise
        self._position.steps += 1
        return committed

    def report(self, committed: CommittedStep) -> None:
        """Report a step to the hooks."""
        try:
            self.optimizer_step.report(committed)
        except BaseException as error:
            self.note_failure(committed.step, error)
            raise

    def note_failure(self, step: StepContext, error: BaseException) -> None:
        """Note the failure of an attempt, unless it is repeated because a rank was lost.

        Raises:
            LossError: The same error with the command that replays the step, because all ranks
                stop for a loss that is not finite; GradientError if a gradient is the reason.
        """
        if self.member is not None and is_lost_peer(error):
            return
        self._fail(step.attempt, error)
        if isinstance(error, (LossError, GradientError)) and step.attempt.is_agreed:
            microbatch = getattr(error, "microbatch", None)
            advice = self._run.record.describe_replay(self._position.steps, microbatch)
            raise type(error)(f"{error}; training stopped{advice}") from None

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        self._run.safe_points.abandon()
        attempt.fail(error)
        code = type(error).__name__
        failure = self._state.history.failure
        failure.clear()
        failure.update(message=f"{code}: {error}", step=attempt.step, code=code)
        if isinstance(error, LossError) and error.loss:
            failure.update(microbatch=error.microbatch, value=error.loss)
        elif isinstance(error, WorkError) and error.reason:
            failure["reason"] = error.reason
        elif not isinstance(error, LockstepError):
            failure["reason"] = str(error).partition("\n")[0]


class OpenStep:
    """One attempt at a step whose micro-batches the script computes.

        opened ── micro-batches ──> prepare ── the script's or the trainer's update ──> commit
           └─────────── exception ──> fail

    Args:
        operation: The steps of the trainer.
        is_repeatable: Whether the script computes micro-batches after a failed `prepare`.
        keeps_work: Whether it then computes only those that a lost rank has not computed.

    Attributes:
        modules: The ids of the modules that the step calls.
        step: The context of the step.
        loop: The loop over the micro-batches.
        prepared: What `prepare` has returned on every rank; None before.
    """

    def __init__(
        self, operation: StepOperation, *, is_repeatable: bool, keeps_work: bool = False
    ) -> None:
        self._operation = operation
        self._keeps_work = keeps_work
        self._member = operation.member
        self._kept = ExitStack()  # until the step is committed or undone
        self.modules = operation.modules
        _open_steps.add(self)
        self._kept.callback(_open_steps.discard, self)
        if self._member is not None:
            self._kept.enter_context(self._member.inside(is_repeatable))
        self.step = operation.begin()
        self.step.is_repeatable = is_repeatable
        self.prepared: PreparedStep | None = None
        self._committed: CommittedStep | None = None
        self._decision: Any = None  # of the launcher, if a rank was lost
        self._begun = time.monotonic()
        self._computing = operation.optimizer_step.computing(self.step)
        try:
            self.loop: Any = self._computing.__enter__()
        except BaseException as error:
            self._handle(error)
            raise

    def prepare(self) -> bool:
        """End the micro-batches, and add the gradients of all ranks.

        Returns:
            Whether the weights may be updated; otherwise the step was undone, and is repeated.
        """
        try:
            self._computing.__exit__(None, None, None)
            self.prepared = self._operation.optimizer_step.prepare(self.step)
            if self._member is not None:
                self._member.pass_barrier()
        except BaseException as error:
            return self._handle(error)
        return True

    def fail(self, error: BaseException) -> None:
        """Undo the step after an exception of the script; raise it, unless a rank was lost."""
        try:
            self._computing.__exit__(type(error), error, error.__traceback__)
        except BaseException as explained:
            self._handle(explained)
        else:
            self._handle(error)

    def commit(self) -> CommittedStep:
        """Commit the step, which is local, and count it."""
        assert self.prepared is not None
        committed = self._operation.commit(self.prepared)
        self._committed = committed
        committed.is_manual = True
        if self._member is not None:
            self._member.operation += 1
            self._member.go_on(self._decision)
        self._kept.close()
        return committed

    def report(self) -> None:
        """Report the committed step to the hooks."""
        assert self._committed is not None
        self._operation.report(self._committed)

    def _handle(self, error: BaseException) -> bool:
        """Undo the step, or let it be committed if a lost rank has committed it; raise others.

        Returns:
            Whether the step is committed; otherwise it is repeated.
        """
        member = self._member
        operation = self._operation
        try:
            if isinstance(error, RepeatStep):
                operation.optimizer_step.undo()
                self._kept.close()
                return False
            if self.prepared is None:
                operation.note_failure(self.step, error)
            if member is None or not isinstance(error, Exception):
                raise error
            is_kept = operation.keep(self._keeps_work)
            self._decision = member.recover(error, self.prepared is not None)
            if self.prepared is not None and member.is_to_commit(self._decision):
                return True
            operation.optimizer_step.undo()
            member.go_on(self._decision, 0.0 if is_kept else time.monotonic() - self._begun)
            self._kept.close()
            return False
        except BaseException:
            self._kept.close()
            raise
