"""The check session: the access of `lockstep check` to the trainers of a script.

Trainer()         gets its layout from the session, takes fingerprints, writes no record or files
after S steps     SessionComplete unwinds the script
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.step_hooks import StepResult
from lockstep.model.blocks import find_block_names
from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.tools.check.layouts import Layout
from lockstep.training.session import ObservedTrainer, SessionComplete

__all__ = ["CheckSession", "choose_options"]

WAIT_FACTOR = 10
"""A trainer may take this many times `steps` while another one has taken fewer than `steps`."""


class CheckSession:
    """The check of one layout on this rank.

    Args:
        layout: The layout of the trainers, which replaces the script's.
        steps: The number of steps per trainer.
        record: Called with the fingerprint of each trainer and of each committed step.
    """

    def __init__(
        self,
        layout: Layout,
        steps: int,
        record: Callable[[TrainerFingerprint | StepFingerprint], None],
    ) -> None:
        self.layout = layout
        self.steps = steps
        self.record = record
        self._trainers: list[CheckedTrainer] = []

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the stages of a trainer of `model`, and whether it shares parameters."""
        return choose_options(self.layout, model, given)

    def attach(self, trainer: ObservedTrainer) -> CheckedTrainer:
        """Return the observer of a newly constructed trainer."""
        attached = CheckedTrainer(self, len(self._trainers), trainer)
        self._trainers.append(attached)
        return attached

    def end_if_complete(self) -> None:
        """Raise SessionComplete when no trainer needs another step."""
        counts = [trainer.steps for trainer in self._trainers]
        if min(counts) >= self.steps or max(counts) >= WAIT_FACTOR * self.steps:
            raise SessionComplete

    def settle(self) -> None:
        """Commit the last step of each loop, after the program has ended."""
        for trainer in self._trainers:
            trainer.settle()

    def record_unfinished(self) -> None:
        """Record the incomplete fingerprints of steps that were begun and not committed."""
        for trainer in self._trainers:
            if trainer.fingerprinter.is_unfinished:
                self.record(trainer.fingerprinter.current)


class CheckedTrainer:
    """The observer of one trainer, which takes the fingerprint of each step."""

    checkpoint: Path | None = None

    def __init__(self, session: CheckSession, number: int, trainer: ObservedTrainer) -> None:
        self._session = session
        self._trainer = trainer
        self.settle = trainer.settle
        self.steps = 0  # committed
        self.fingerprinter = Fingerprinter(
            number,
            trainer.parallel,
            trainer.called,
            trainer.module,
            trainer.has_whole_gradients,
        )
        session.record(self.fingerprinter.trainer(trainer.backend))

    def begin_step(self, step: int) -> Fingerprinter:
        """Return the fingerprinter, which observes the step."""
        return self.fingerprinter

    def commit(self, result: StepResult) -> None:
        """Record a step; raise SessionComplete when no trainer needs another one."""
        trainer = self._trainer
        loss = result.loss
        state = trainer.optimizer_state()
        self._session.record(self.fingerprinter.commit(loss, trainer.digest(), state))
        self.steps += 1
        self._session.end_if_complete()


def choose_options(
    layout: Layout, model: nn.Module | Sequence[Any], given: PipelineConfig
) -> tuple[PipelineConfig, bool]:
    """Return the stages of a trainer of `model` in a layout, and whether it shares parameters.

    The blocks are divided evenly if their number is known, so that no time is measured.
    """
    blocks = given.blocks
    if layout.stages == 1:
        return PipelineConfig(blocks=blocks), layout.shared
    stages = layout.stages * (layout.stages_per_rank or 1)
    count = 0
    if isinstance(model, nn.Module):
        count = len(find_block_names(model, blocks))
    elif blocks is None:
        count = len(model)
    balance = [len(span) for span in split_evenly(count, stages)] if count >= stages else None
    schedule = layout.schedule
    per_rank = layout.stages_per_rank
    return PipelineConfig(layout.stages, schedule, blocks, balance, per_rank), False
