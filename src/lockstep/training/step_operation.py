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
from typing import Any

from torch import nn

from lockstep.kernel.errors import GradientError, LossError, UsageError
from lockstep.kernel.step import OptimizerStep, PreparedStep
from lockstep.kernel.step_context import Attempt, StepContext
from lockstep.kernel.step_hooks import CommittedStep, RepeatStep
from lockstep.launcher.failure_codes import is_lost_peer
from lockstep.model.collective_calls import CollectiveCallGuard
from lockstep.training.manual_step import ManualStep
from lockstep.training.resumable_run import ResumableRun

__all__ = ["StepOperation"]

_open_steps: list[set[int]] = []
"""For each manual step that is open in this process, the ids of the modules that it calls."""


class StepOperation:
    """The steps of one trainer, undone and repeated if a rank of an elastic run is lost.

    Args:
        optimizer_step: The phases of a step.
        model: The model, or its compiled wrapper.
        run: The run, whose checkpoints are abandoned if training fails.
    """

    def __init__(self, optimizer_step: OptimizerStep, model: nn.Module, run: ResumableRun) -> None:
        self._optimizer_step, self._run, self._member = optimizer_step, run, run.member
        self._state, self._position = run.state, run.state.position
        self._parallel = run.state.parallel
        modules = self._parallel.modules_with(model).values()
        self._modules = {id(getattr(module, "_orig_mod", module)) for module in modules}

    def take(self, batch: Any) -> float:
        """Take one step on a batch, and return its loss."""
        if _open_steps:
            self.require_closed("step()")
        if self._member is None:
            committed = self._commit(self._prepare(batch))
        else:
            prepare = partial(self._prepare, batch)
            committed = self._member.run(prepare, self._commit, self._optimizer_step.undo)
        self._report(committed)
        return committed.result.loss

    def _prepare(self, batch: Any) -> PreparedStep:
        while True:
            step = self._begin()
            try:
                given = batch if self._state.executor.is_ready else self._partition(step, batch)
                return self._optimizer_step.compute(step, given)
            except RepeatStep:
                self._optimizer_step.undo()
            except BaseException as error:
                self._note_failure(step, error)
                raise

    def _partition(self, step: StepContext, batch: Any) -> Any:
        """Partition the model into stages with the first batch; return this rank's part of it."""
        with CollectiveCallGuard(lambda: step.where):
            return self._state.executor.prepare(batch)

    def open_manual(self) -> ManualStep:
        """Return the context of a step whose micro-batches the script computes."""
        self._require_whole_model()
        return ManualStep(self._open(is_repeatable=False))

    def open_attempts(self, *batches: Any) -> Iterator[ManualStep]:
        """Yield the attempts at a step on batches, whose micro-batches the script computes."""
        self._require_whole_model()
        while True:
            step = ManualStep(self._open(is_repeatable=True), *batches)
            yield step
            if not step.was_interrupted:
                return

    def require_closed(self, call: str) -> None:
        """Raise UsageError if a manual step that calls one of the modules is open."""
        if any(modules & self._modules for modules in _open_steps):
            raise UsageError(
                f"trainer.{call} was called inside of `with trainer.manual_step()`, where the "
                "model has the buffers of this rank's micro-batch: call it after the block"
            )

    def _require_whole_model(self) -> None:
        if self._parallel.stages > 1:
            raise UsageError(
                "a manual step needs the whole model on every rank: with stages, call "
                "trainer.step(batch), or train without pipeline="
            )
        self._run.require_repeatable_step()

    @contextmanager
    def _open(self, *, is_repeatable: bool) -> Iterator[Any]:
        """Return the context of a step whose micro-batches the body computes, with its loop.

        Args:
            is_repeatable: Whether the body runs again if the loop has no result, such as after a
                processor has computed wrong. Otherwise this process is replaced if a rank is lost.
        """
        member = self._member
        self.require_closed("manual_step()")
        with ExitStack() as stack:
            _open_steps.append(self._modules)
            stack.callback(_open_steps.remove, self._modules)
            if member is not None:
                stack.enter_context(member.inside(is_repeatable))
            step, prepared, decision = self._begin(), None, None
            step.is_repeatable = is_repeatable
            begun = time.monotonic()
            try:
                try:
                    with self._optimizer_step.computing(step) as loop:
                        yield loop
                    prepared = self._optimizer_step.prepare(step)
                except RepeatStep:
                    self._optimizer_step.undo()
                    return
                except BaseException as error:
                    self._note_failure(step, error)
                    raise
                if member is not None:
                    member.pass_barrier()
            except Exception as error:
                if member is None:
                    raise
                decision = member.recover(error, prepared is not None)
                if prepared is None or not member.is_to_commit(decision):
                    self._optimizer_step.undo()
                    member.go_on(decision, time.monotonic() - begun)
                    return
            committed = self._commit(prepared)
            if member is not None:
                member.operation += 1
                member.go_on(decision)
        loop.result = committed.result
        committed.is_manual = True
        self._report(committed)

    def _begin(self) -> StepContext:
        """Begin an attempt at the next step."""
        position = self._position
        last = position.attempt
        position.attempt = Attempt(last.trainer, position.steps, last.number + 1, last.failure)
        return StepContext(position.attempt, self._parallel)

    def _commit(self, prepared: PreparedStep) -> CommittedStep:
        try:
            committed = self._optimizer_step.commit(prepared)
        except BaseException as error:
            self._note_failure(prepared.step, error)
            raise
        self._position.steps += 1
        return committed

    def _report(self, committed: CommittedStep) -> None:
        try:
            self._optimizer_step.report(committed)
        except BaseException as error:
            self._note_failure(committed.step, error)
            raise

    def _note_failure(self, step: StepContext, error: BaseException) -> None:
        """Note the failure of an attempt, unless it is repeated because a rank was lost.

        Raises:
            LossError: The same error with the command that replays the step, because all ranks
                stop for a loss that is not finite; GradientError if a gradient is the reason.
        """
        if self._member is not None and is_lost_peer(error):
            return
        self._fail(step.attempt, error)
        if isinstance(error, (LossError, GradientError)) and step.attempt.is_agreed:
            microbatch = getattr(error, "microbatch", None)
            advice = self._run.record.describe_replay(self._position.steps, microbatch)
            raise type(error)(f"{error}; training stopped{advice}") from None

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        self._run.safe_points.abandon()
        attempt.fail(error)
        self._state.history.failures[:] = [f"{type(error).__name__}: {error}"]
