"""Sessions: how a command reaches the trainers of an unchanged script.

    rank starts     the command opens a session in the process, then the script runs
    Trainer()       asks for it: layout from the session, no record, no files, no progress
    a step          its observer sees what is computed, and the committed step
    enough seen     SessionComplete unwinds the script, which ends the rank successfully

`lockstep check` and `lockstep replay` have one each. Without a session, a trainer works as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from lockstep.model.parallel_context import ParallelContext
from lockstep.model.step_context import StepObserver
from lockstep.pipeline.partitioner import PipelineConfig
from lockstep.training.step import CommittedStep

__all__ = [
    "ObservedTrainer",
    "Session",
    "SessionComplete",
    "TrainerObserver",
    "current_session",
    "open_session",
]


class SessionComplete(BaseException):
    """The command has seen all it needs; no `except Exception` of a script stops this."""


@dataclass(frozen=True)
class ObservedTrainer:
    """What a session gets of a trainer that has just been constructed.

    Attributes:
        backend: The backend of the ranks.
        parallel: The layout, the loss and other modules.
        called: What the trainer calls: the model, or what compiled it.
        module: The model.
        has_whole_gradients: Whether `.grad` holds whole gradients after the reduction.
        digest: Returns the digest of the model; a collective call with stages.
        optimizer_state: Returns the optimizer's state on this rank, as "weight/exp_avg".
    """

    backend: str
    parallel: ParallelContext
    called: nn.Module
    module: nn.Module
    has_whole_gradients: bool
    digest: Callable[[], str]
    optimizer_state: Callable[[], Mapping[str, Any]]


class TrainerObserver(Protocol):
    """What a session does with one trainer."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which the trainer continues; None for its beginning."""

    def begin_step(self, step: int) -> StepObserver | None:
        """Return what observes a step that begins; None if nothing does."""

    def commit(self, committed: CommittedStep) -> None:
        """Take in a committed step; may raise SessionComplete, on every rank alike."""


class Session(Protocol):
    """What a command does with the trainers of a script."""

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the stages of a trainer of `model`, and whether it shares parameters."""

    def attach(self, trainer: ObservedTrainer) -> TrainerObserver:
        """Return what observes a trainer that has just been constructed."""


AnySession = TypeVar("AnySession", bound=Session)

_current: Session | None = None


def current_session() -> Session | None:
    """Return the session of this process; None where no command opened one."""
    return _current


@contextmanager
def open_session(session: AnySession) -> Iterator[AnySession]:
    """Use `session` for the trainers of this process while the body runs."""
    global _current
    _current = session
    try:
        yield session
    finally:
        _current = None
