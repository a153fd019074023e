"""Sessions: the access of a command to the trainers of an unchanged script.

    rank starts     the command opens a session in the process, then the script runs
    Trainer()       gets its layout from the session; writes no record, no files, no progress
    a step          the session's observer gets its tensors and the committed step
    command done    SessionComplete unwinds the script, which ends the rank successfully

`lockstep check`, `lockstep replay` and `lockstep plan` each have a session. Without one, a trainer
works as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn
from torch.optim import Optimizer

from lockstep.kernel.step_context import Position, StepContext
from lockstep.kernel.step_hooks import CommittedStep, StepHook, StepResult
from lockstep.model.parallel_context import ParallelContext
from lockstep.pipeline.partitioner import PipelineConfig

__all__ = [
    "ObservationHook",
    "ObservedTrainer",
    "RecordingObserver",
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
        settle: The function that commits the last step of a script's loop, if it is still open.
        failure: The failure of its latest step, as fields of the record's last line, from now on.
        optimizers: The optimizers.
        is_exact: Whether it is a handle of `ls.exact`.
    """

    backend: str
    parallel: ParallelContext
    called: nn.Module
    module: nn.Module
    has_whole_gradients: bool
    digest: Callable[[], str]
    optimizer_digest: Callable[[], str]
    optimizer_state: Callable[[], Mapping[str, Any]]
    settle: Callable[[], None]
    failure: Mapping[str, Any]
    optimizers: Sequence[Optimizer] = ()
    is_exact: bool = False


class RecordingObserver(Protocol):
    """An observer of the micro-batches of a step, with a context around them."""

    def recording(self, step: StepContext, position: Position) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches are computed.

        Args:
            step: The step, to whose observers this one belongs.
            position: A function that returns the (micro-batch, stage) being computed; None between
                them.
        """


class TrainerObserver(Protocol):
    """The interface through which a session observes one trainer."""

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which the trainer continues; None: it starts from the beginning."""

    def begin_step(self, step: int) -> RecordingObserver | None:
        """Return the observer of a step that begins; None: it is not observed."""

    def commit(self, result: StepResult) -> None:
        """Handle a committed step; may raise SessionComplete, then on every rank."""


class ObservationHook(StepHook):
    """The hook through which a command observes a trainer.

    Args:
        observer: The observer of the trainer.
        position: A function that returns the micro-batch and the stage that are being computed.
    """

    def __init__(self, observer: TrainerObserver, position: Position) -> None:
        self.observer = observer
        self._position = position

    def begin(self, step: StepContext, batch: Any) -> AbstractContextManager[None] | None:
        """Let the observer of the step record its micro-batches."""
        observer = self.observer.begin_step(step.number)
        return None if observer is None else observer.recording(step, self._position)

    def report(self, committed: CommittedStep) -> None:
        """Report the result of the step."""
        self.observer.commit(committed.result)


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
