"""Sessions: the access of a command to the trainers of an unchanged script.

    rank starts     the command opens a session in the process, then the script runs
    Trainer()       gets its layout from the session; writes no record, no files, no progress
    a step          the session's observer gets its tensors and the committed step
    command done    SessionComplete unwinds the script, which ends the rank successfully

`lockstep check` and `lockstep replay` each have a session. Without one, a trainer works as usual.
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
    """Raised to end a script when the command is done; `except Exception` does not catch it."""


@dataclass(frozen=True)
class ObservedTrainer:
    """The parts of a newly constructed trainer that a session observes.

    Attributes:
        backend: The backend of the ranks.
        parallel: The layout, the loss and other modules.
        called: The module that the trainer calls: the model, or its compiled wrapper.
        module: The model.
        has_whole_gradients: Whether `.grad` holds whole gradients after the reduction.
        digest: The function that returns the digest of the model; a collective call with stages.
        optimizer_digest: The same for the optimizer's state.
        optimizer_state: The function that returns the optimizer's state on this rank, by names
            such as "weight/exp_avg".
    """

    backend: str
    parallel: ParallelContext
    called: nn.Module
    module: nn.Module
    has_whole_gradients: bool
    digest: Callable[[], str]
    optimizer_digest: Callable[[], str]
    optimizer_state: Callable[[], Mapping[str, Any]]


class TrainerObserver(Protocol):
    """The interface through which a session observes one trainer."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which the trainer continues; None: it starts from the beginning."""

    def begin_step(self, step: int) -> StepObserver | None:
        """Return the observer of a step that begins; None: it is not observed."""

    def commit(self, committed: CommittedStep) -> None:
        """Handle a committed step; may raise SessionComplete, then on every rank."""


class Session(Protocol):
    """The interface of a command to the trainers of a script."""

    def options(
        self, model: nn.Module | Sequence[Any], given: PipelineConfig
    ) -> tuple[PipelineConfig, bool]:
        """Return the pipeline settings of a trainer of `model`, and whether storage is shared."""

    def attach(self, trainer: ObservedTrainer) -> TrainerObserver:
        """Return the observer of a newly constructed trainer."""


AnySession = TypeVar("AnySession", bound=Session)

_current: Session | None = None


def current_session() -> Session | None:
    """Return the session of this process; None if no command opened one."""
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
