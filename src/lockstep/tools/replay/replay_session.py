"""Replay session: the effect of `lockstep replay` on the trainers of a recorded program.

Trainer()          has the layout of the replay; continues from the checkpoint
steps before       are computed as in the run, and counted
wanted steps       record results and digest; at other levels, also fingerprints or operators
after the last     SessionComplete unwinds the program
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.audit.operator_tracer import OperatorTracer, record_graphs_as_operators
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.step_hooks import StepResult
from lockstep.launcher.rank_process import get_launch_number
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.tools.replay.result import ReplayedStep, ReplayRequest
from lockstep.tools.replay.single_microbatch import LoneMicrobatch
from lockstep.training.session import (
    ObservedTrainer,
    RecordingObserver,
    SessionComplete,
    TrainerObserver,
)

__all__ = ["ReplaySession"]


class ReplaySession:
    """The replay on this rank.

    Args:
        request: The steps that are wanted.
        trainer: The trainer that they belong to: the index of the call of `ls.launch` in the
            program (None outside of such a call), and the index of the trainer in that call.
        checkpoint: The checkpoint from which the replay begins; None for the beginning.
        record: Called with each wanted step, the same on every rank except for fingerprints, and
            with the failure of a step for which the program ends, as a dict.
    """

    def __init__(
        self,
        request: ReplayRequest,
        trainer: tuple[int | None, int],
        checkpoint: Path | None,
        record: Callable[[Any], None],
    ) -> None:
        self.request = request
        self.record = record
        self.trainer = trainer
        self._checkpoint = checkpoint
        self._counts: Counter[int | None] = Counter()  # trainers per call of `launch`
        self._observed: ObservedTrainer | None = None

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the pipeline options of a trainer of `model`, and whether it shares parameters."""
        return PipelineConfig(blocks=given.blocks), False

    def attach(self, trainer: ObservedTrainer) -> TrainerObserver:
        """Return the observer of a trainer; all but the recorded trainer are left unobserved."""
        launch = get_launch_number()
        number = self._counts[launch]
        self._counts[launch] += 1
        if (launch, number) != self.trainer:
            return UnobservedTrainer()
        self._observed = trainer
        return ReplayedTrainer(self, trainer, self._checkpoint)

    def settle(self) -> None:
        """Commit the last step of a loop, after the program has ended."""
        if self._observed is not None:
            self._observed.settle()

    def record_unfinished(self) -> None:
        """Record the failure of a step, which has no other results."""
        if self._observed is not None and self._observed.failure:
            self.record(self._observed.failure)


class UnobservedTrainer:
    """A trainer whose steps are not wanted."""

    checkpoint: Path | None = None

    def begin_step(self, step: int) -> None:
        """Observe nothing."""

    def commit(self, result: StepResult) -> None:
        """Do nothing."""


class ReplayedTrainer:
    """The trainer whose steps are wanted."""

    def __init__(
        self, session: ReplaySession, trainer: ObservedTrainer, checkpoint: Path | None
    ) -> None:
        self._session = session
        self._trainer = trainer
        self.checkpoint = checkpoint
        self._fingerprinter: Fingerprinter | None = None
        self._tracer: OperatorTracer | None = None
        if session.request.level == "modules":
            self._fingerprinter = Fingerprinter(
                session.trainer[1],
                trainer.parallel,
                trainer.called,
                trainer.module,
                trainer.has_whole_gradients,
                with_backward=True,
            )

    def begin_step(self, step: int) -> RecordingObserver | None:
        """Return the observer of a step; None for none."""
        request = self._session.request
        if request.is_alone:
            if not self._is_wanted(step):
                return None
            trainer = self._trainer
            return LoneMicrobatch(request, trainer.called, self._record_alone)
        if request.level != "operators":
            return self._fingerprinter if self._is_wanted(step) else None
        record_graphs_as_operators()
        if self._is_wanted(step):
            modules = self._trainer.parallel.modules_with(self._trainer.called)
            kept = request.kept if step == request.first else None
            self._tracer = OperatorTracer(modules, kept)
        return self._tracer

    def commit(self, result: StepResult) -> None:
        """Record a wanted step; end the program after the last one."""
        session = self._session
        if self._is_wanted(result.step):
            self._record(result)
        if result.step >= session.request.last:
            raise SessionComplete

    def _is_wanted(self, step: int) -> bool:
        return self._session.request.first <= step <= self._session.request.last

    def _record(self, result: StepResult) -> None:
        """Record a wanted step; with pipeline stages this is a collective call."""
        digest = self._trainer.digest()
        fingerprints = []
        tracer = self._tracer
        if self._fingerprinter is not None:
            state = self._trainer.optimizer_state()
            fingerprint = self._fingerprinter.commit(result.loss, digest, state)
            fingerprints.append(fingerprint)
        self._session.record(
            ReplayedStep(
                step=result.step,
                epoch=result.epoch,
                loss=result.loss,
                norm=result.norm,
                losses=tuple(result.losses),
                batch=result.batch,
                digest=digest,
                optimizer_digest=self._trainer.optimizer_digest(),
                fingerprints=fingerprints,
                operators=[] if tracer is None else tracer.calls,
                kept=None if tracer is None else tracer.kept,
            )
        )

    def _record_alone(
        self,
        step: StepContext,
        loss: float | None,
        samples: tuple[int, ...] | None,
    ) -> None:
        """Record the micro-batch that was computed alone."""
        assert step.batch is not None
        losses: list[float | None] = [None] * step.batch.leaves
        losses[self._session.request.microbatch or 0] = loss
        identity = step.batch.identity
        self._session.record(
            ReplayedStep(
                step=step.number,
                epoch=step.batch.epoch,
                losses=tuple(losses),
                batch=identity.samples or identity.checksum or None,
                samples=samples,
            )
        )
