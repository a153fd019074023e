"""Check session: what `lockstep check` does with the trainers of a script.

Trainer()       layout from the session, fingerprints, no record, no files
S steps         SessionComplete unwinds the script
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.check.layouts import Layout
from lockstep.data.microbatch import split_evenly
from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.pipeline.partition import find_block_names
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.training.session import ObservedTrainer, SessionComplete
from lockstep.training.step import CommittedStep

__all__ = ["CheckSession", "choose_options"]

WAIT_FACTOR = 10
"""How many times its steps a trainer may take while another one has too few."""


class CheckSession:
    """The check of one layout on this rank.

    Args:
        layout: What the trainers are given, instead of what the script says.
        steps: The number of steps per trainer.
        record: Called with each trainer's fingerprint and that of each committed step.
    """

    def __init__(
        self,
        layout: Layout,
        steps: int,
        record: Callable[[TrainerFingerprint | StepFingerprint], None],
    ) -> None:
        self.layout, self.steps = layout, steps
        self.record = record
        self._trainers: list[CheckedTrainer] = []

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the stages of a trainer of `model`, and whether it shares parameters."""
        return choose_options(self.layout, model, given)

    def attach(self, trainer: ObservedTrainer) -> CheckedTrainer:
        """Return what takes the fingerprints of a trainer that has just been constructed."""
        attached = CheckedTrainer(self, len(self._trainers), trainer)
        self._trainers.append(attached)
        return attached

    def end_if_complete(self) -> None:
        """Raise SessionComplete when no trainer needs another step."""
        counts = [each.steps for each in self._trainers]
        if min(counts) >= self.steps or max(counts) >= WAIT_FACTOR * self.steps:
            raise SessionComplete

    def record_unfinished(self) -> None:
        """Record what is there of the steps that were begun and not committed."""
        for each in self._trainers:
            if each.fingerprinter.is_unfinished:
                self.record(each.fingerprinter.current)


class CheckedTrainer:
    """One trainer of a check: all its steps have fingerprints."""

    checkpoint: Path | None = None

    def __init__(self, session: CheckSession, number: int, trainer: ObservedTrainer) -> None:
        self._session, self._trainer = session, trainer
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
        """Return what takes the fingerprint of a step."""
        return self.fingerprinter

    def commit(self, committed: CommittedStep) -> None:
        """Record a step; raise SessionComplete when no trainer needs another one."""
        trainer = self._trainer
        loss, state = committed.result.loss, trainer.optimizer_state()
        self._session.record(self.fingerprinter.commit(loss, trainer.digest(), state))
        self.steps += 1
        self._session.end_if_complete()


def choose_options(
    layout: Layout, model: nn.Module | Sequence[Any], given: PipelineConfig
) -> tuple[PipelineConfig, bool]:
    """Return the stages of a trainer of `model` in a layout, and whether it shares parameters.

    The blocks are cut evenly where their number is known, so that nothing is measured.
    """
    blocks = given.blocks
    if layout.stages == 1:
        return PipelineConfig(blocks=blocks), layout.shared
    stages = layout.stages * (layout.stages_per_rank or 1)
    count = 0
    if isinstance(model, nn.Module):
        count = 0 if hasattr(model, "_orig_mod") else len(find_block_names(model, blocks))
    elif blocks is None:
        count = len(model)
    balance = [len(span) for span in split_evenly(count, stages)] if count >= stages else None
    schedule, per_rank = layout.schedule, layout.stages_per_rank
    return PipelineConfig(layout.stages, schedule, blocks, balance, per_rank), False
