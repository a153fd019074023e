"""Check session: how `lockstep check` reaches the trainers of an unchanged script.

    rank starts     a session is opened in the process, then the script runs
    Trainer()       asks for it: layout from the session, fingerprints, no record, no files
    S steps         CheckComplete unwinds the script, which ends the rank successfully

Without a session, a trainer works as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lockstep.check.layouts import Layout
from lockstep.data.microbatch import split_evenly
from lockstep.model.fingerprint import StepFingerprint, TrainerFingerprint
from lockstep.model.fingerprinter import Fingerprinter
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.partition import find_block_names
from lockstep.pipeline.partitioner import PipelineConfig

__all__ = ["CheckComplete", "Session", "current_session", "open_session"]

WAIT_FACTOR = 10
"""How many times its steps a trainer may take while another one has too few."""


class CheckComplete(BaseException):
    """Every trainer has taken its steps; no `except Exception` of a script stops this."""


class Session:
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
        self._record = record
        self._fingerprinters: list[Fingerprinter] = []
        self._counts: list[int] = []  # of each trainer's committed steps

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the stages of a trainer of `model`, and whether it shares parameters.

        The blocks are cut evenly where their number is known, so that nothing is measured.
        """
        layout, blocks = self.layout, given.blocks
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

    def fingerprinter(
        self,
        backend: str,
        parallel: ParallelContext,
        called: nn.Module,
        module: nn.Module,
        has_whole_gradients: bool,
    ) -> Fingerprinter:
        """Return the fingerprinter of a trainer that has just been constructed."""
        made = Fingerprinter(len(self._counts), parallel, called, module, has_whole_gradients)
        self._fingerprinters.append(made)
        self._counts.append(0)
        self._record(made.trainer(backend))
        return made

    def commit(
        self, fingerprinter: Fingerprinter, loss: float, digest: str, optimizer: Mapping[str, Any]
    ) -> None:
        """Record a trainer's step; raise CheckComplete when no trainer needs another one."""
        self._record(fingerprinter.commit(loss, digest, optimizer))
        self._counts[fingerprinter.number] += 1
        if min(self._counts) >= self.steps or max(self._counts) >= WAIT_FACTOR * self.steps:
            raise CheckComplete

    def record_unfinished(self) -> None:
        """Record what is there of the steps that were begun and not committed."""
        for each in self._fingerprinters:
            if each.is_unfinished:
                self._record(each.current)


_current: Session | None = None


def current_session() -> Session | None:
    """Return the session of this process; None outside of `lockstep check`."""
    return _current


@contextmanager
def open_session(session: Session) -> Iterator[Session]:
    """Use `session` for the trainers of this process while the body runs."""
    global _current
    _current = session
    try:
        yield session
    finally:
        _current = None
