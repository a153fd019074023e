"""The history of a training, reported to callbacks and loggers."""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import orjson

from lockstep.kernel.errors import UsageError
from lockstep.kernel.step_hooks import CommittedStep, StepHook, StepResult
from lockstep.launcher.run_folder import RECORD_FILE
from lockstep.model.evaluation import Evaluation
from lockstep.record.logged_value import convert_value
from lockstep.record.loggers import Logger
from lockstep.record.progress import Progress
from lockstep.record.recorder import Recorder
from lockstep.redaction import redact
from lockstep.training.step_usage import RankUsage
from lockstep.user_code import is_user_code

__all__ = [
    "Callback",
    "EpochResult",
    "History",
    "OnEpoch",
    "OnStep",
    "StepResult",
    "describe_step",
]

NUMBERS = ("step", "epoch", "log")  # lines that hold numbers, and so no secret
TAIL_BYTES = 1 << 17  # of the record, searched for lines that the lost rank 0 wrote

IDENTITIES = {"step": "step", "epoch": "epoch", "warning": "message"}
"""Kinds of lines that a new rank 0 writes if they are missing, and the field that identifies one.
"""
BACKLOG = 16  # lines that each rank keeps for this


@dataclass(frozen=True)
class EpochResult:
    """The result of one epoch.

    Attributes:
        epoch: The epoch, from 0.
        loss: The mean over the samples of the losses during training.
        metrics: The means over the samples of the metrics during training.
        samples: The number of samples trained on.
        seconds: The sum of the durations of its steps, in seconds.
        evaluation: The evaluation that followed the epoch; None if there was none.
    """

    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    evaluation: Evaluation | None = None


class OnStep(Protocol):
    """A callback that is called after every step."""

    def on_step(self, result: StepResult, /) -> None:
        """Handle the result of a committed step."""


class OnEpoch(Protocol):
    """A callback that is called after every epoch."""

    def on_epoch(self, result: EpochResult, /) -> None:
        """Handle the result of an epoch whose last batch was trained."""


Callback = Callable[[StepResult], None] | OnStep | OnEpoch
"""A function of a `StepResult`, or an object with `on_step(result)` or `on_epoch(result)`."""


# It has many methods: what a step, an epoch, an evaluation and a script report, on its way to the
# record, and those of a hook.
class History(StepHook):
    """The history of a training: sums steps up into epochs, and calls callbacks and loggers.

    The line of an epoch contains its evaluation. It is therefore written only at the next
    evaluation, the next step or the end of the training.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        callbacks: Callback | Sequence[Callback] = (),
        progress: Progress | None = None,
    ) -> None:
        self.loggers = list(loggers)
        self.progress = progress
        self._on_step, self._on_epoch = _split_callbacks(callbacks)
        self._open = _Sums()
        self._pending: EpochResult | None = None
        self._usage: RankUsage | None = None
        self._warned: set[str] = set()
        self.samples = 0
        self.epochs = 0
        """The number of epochs in the record."""
        self.last: StepResult | None = None
        self.failure: dict[str, Any] = {}
        """The failure of the latest step, as fields of the last line; empty if it succeeded."""
        self._backlog: deque[tuple[str, dict[str, Any]]] | None = None

    def keep_backlog(self) -> None:
        """Keep the last lines from now on, which this rank may have to write if rank 0 is lost.

        No rank is more than one operation ahead of another, so a few lines are enough.
        """
        if self._backlog is None:
            self._backlog = deque(maxlen=BACKLOG)

    def take_backlog(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines that were kept; none are kept from now on."""
        kept = self._backlog
        self._backlog = None
        return list(kept or ())

    @property
    def backlog(self) -> list[tuple[str, dict[str, Any]]]:
        """The lines that were kept."""
        return list(self._backlog or ())

    def write_missing(self, lines: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Write those of the given lines that the lost rank 0 has not written."""
        folder = self.find_run_folder()
        if folder is None:
            return
        known = _read_identities(folder / RECORD_FILE)
        for kind, fields in lines:
            if _identify(kind, fields) not in known:
                self.write(kind, **fields)

    def find_run_folder(self) -> Path | None:
        """Return the folder in which the run is recorded; None if it is not."""
        recorders = (logger for logger in self.loggers if isinstance(logger, Recorder))
        return next((recorder.folder.absolute() for recorder in recorders), None)

    def write(self, kind: str, **fields: Any) -> None:
        """Pass one line to every logger, with secrets redacted."""
        if self._backlog is not None and kind in IDENTITIES:
            self._backlog.append((kind, fields))
        if kind not in NUMBERS:
            fields = redact(fields)
        for logger in self.loggers:
            logger.write(kind, **fields)

    def describe_last(self) -> dict[str, Any] | None:
        """Return the result of the last step as plain values, without those of single ranks."""
        if self.last is None:
            return None
        return asdict(replace(self.last, ranks=[], outside=[], losses=[]))

    def set_last(self, last: Mapping[str, Any] | None) -> None:
        """Set the result of the last step to one that `describe_last` returned."""
        self.last = None if last is None else StepResult(**last)

    @property
    def steps(self) -> int:
        """The number of steps in the record."""
        return 0 if self.last is None else self.last.step + 1

    def report(self, committed: CommittedStep) -> None:
        """Write the warnings and the result of a step."""
        summary = committed.summary
        own = committed.step.parallel.rank
        for rank, warning in summary.warnings:
            self.warn(rank, warning.place, warning.sentence, show=rank == own)
        self.step(committed.result, summary.hooks["usage"])

    def step(self, result: StepResult, usage: RankUsage | None = None) -> None:
        """Add one step, and the usage of the ranks in it."""
        if self._pending is not None:
            self.flush()
        self.failure.clear()
        self._usage = usage
        self._open.add(result)
        self.samples += result.samples
        self.last = result
        if self.loggers or self._backlog is not None:
            self.write("step", **describe_step(result))
        if self.progress is not None:
            self.progress.step(**vars(result))
        for callback in self._on_step:
            callback(result)

    def begin_epoch(self, epoch: int, steps: int | None, done: int = 0) -> None:
        """Begin an epoch, and discard the sums of an epoch that was not completed.

        Args:
            epoch: The epoch, from 0.
            steps: The number of its steps; None if it is not known.
            done: The number of steps that were taken before the epoch was resumed. Above 0, the
                sums of those steps are kept.
        """
        if not done:
            self._open = _Sums()
        if self.progress is not None:
            self.progress.begin_epoch(epoch, steps, done)

    @property
    def is_inside_epoch(self) -> bool:
        """Whether an epoch has begun, with at least one step, and not ended."""
        return self._open.samples > 0

    def end_epoch(self, epoch: int) -> EpochResult | None:
        """Return the result of the epoch; None if it had no step. `notify` calls the callbacks."""
        steps = self._open
        self._open = _Sums()
        if not steps.samples:
            return None
        self._pending = EpochResult(
            epoch=epoch,
            loss=float(steps.loss / steps.samples),
            metrics={
                name: float(value / samples) for name, (value, samples) in steps.metrics.items()
            },
            samples=steps.samples,
            seconds=steps.seconds,
        )
        return self._pending

    def notify(self, result: EpochResult) -> None:
        """Call the callbacks of an epoch."""
        for callback in self._on_epoch:
            callback(result)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the history, as plain numbers and texts.

        It has the sums of the current epoch, the ended epoch that waits for its evaluation, the
        last step, and the numbers of samples and of epochs in the record.
        """
        return {
            "open": self._open.state_dict(),
            "pending": None if self._pending is None else asdict(self._pending),
            "last": None if self.last is None else asdict(self.last),
            "samples": self.samples,
            "epochs": self.epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._open = _Sums.from_state(state["open"])
        pending = state.get("pending")
        if pending is not None and pending["evaluation"] is not None:
            pending = {**pending, "evaluation": Evaluation(**pending["evaluation"])}
        self._pending = None if pending is None else EpochResult(**pending)
        self.set_last(state.get("last"))
        self.samples = state.get("samples", 0)
        self.epochs = state.get("epochs", 0)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the epoch that was just closed, or log that of averaged weights."""
        if self._pending is not None:
            self._pending = replace(self._pending, evaluation=evaluation)
            self.flush()
        elif evaluation.ema:
            for name, value in {"loss": evaluation.loss, **evaluation.metrics}.items():
                self.log(f"held out (EMA) {name}", value)

    def log(self, name: str, value: Any, kind: str = "scalar") -> None:
        """Write a value that the script logs, at the latest step."""
        fields = convert_value(name, value, kind)
        if self.loggers:
            self.write("log", step=max(self.steps - 1, 0), name=redact(name), **fields)

    def flush(self) -> None:
        """Write the line of the ended epoch, if it has not been written."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        self.epochs += 1
        if self.progress is not None:
            self.progress.epoch(**asdict(pending))
        if self.loggers or self._backlog is not None:
            memory = [] if self._usage is None else self._usage.list_memory()
            self.write("epoch", **_without_none(asdict(pending)), memory_bytes=memory)

    def warn(self, rank: int, place: str, sentence: str, show: bool) -> None:
        """Write a warning to the record, and show it if `show`; once per sentence, from any place.

        Args:
            rank: The rank that warns.
            place: Where it warns.
            sentence: The sentence, which is the same at any place.
            show: Whether to call `warnings.warn`.
        """
        if sentence not in self._warned:
            self._warned.add(sentence)
            message = f"{place}: {sentence}"
            if show:
                warnings.warn(message, stacklevel=_find_stack_level())
            self.write("warning", rank=rank, message=message)

    def close(self, **fields: Any) -> None:
        """Write the last line and close the loggers."""
        self.flush()
        if self.progress is not None:
            self.progress.close()
        if fields["state"] == "failed":
            fields = self.failure | fields
        if self.last is not None:
            fields |= {"loss": self.last.loss, "metrics": self.last.metrics}
        self.write("end", **_without_none(fields | {"samples": self.samples}))
        for logger in self.loggers:
            logger.close()
        self.loggers = []


def _split_callbacks(callbacks: Callback | Sequence[Callback]) -> tuple[list[Any], list[Any]]:
    """Return the functions to call after every step, and those to call after every epoch."""
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    on_step = []
    on_epoch = []
    for callback in given:
        methods = getattr(callback, "on_step", None), getattr(callback, "on_epoch", None)
        if methods == (None, None) and not callable(callback):
            raise UsageError(
                f"callbacks: a {type(callback).__name__} is neither a function that takes a "
                "StepResult nor an object with a method on_step(result) or on_epoch(result)"
            )
        on_step += [methods[0] or callback] if methods[0] or methods[1] is None else []
        on_epoch += [methods[1]] if methods[1] else []
    return on_step, on_epoch


@dataclass
class _Sums:
    """The exact sums of an epoch so far; exact so that resuming changes no bit."""

    numerator: int = 0  # of the loss
    denominator: int = 1  # a power of two
    has_unknown: bool = False  # whether the loss of a step is not known
    metrics: dict[str, tuple[Fraction | float, int]] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> Fraction | float:
        return math.nan if self.has_unknown else Fraction(self.numerator, self.denominator)

    def add(self, result: StepResult) -> None:
        self.has_unknown = self.has_unknown or math.isnan(result.loss)
        numerator, denominator = (0.0 if self.has_unknown else result.loss).as_integer_ratio()
        if denominator > self.denominator:
            self.numerator *= denominator // self.denominator
            self.denominator = denominator
        self.numerator += numerator * result.samples * (self.denominator // denominator)
        for name, value in result.metrics.items():
            total, samples = self.metrics.get(name, (Fraction(0), 0))
            self.metrics[name] = total + _exact(value) * result.samples, samples + result.samples
        self.samples += result.samples
        self.seconds += result.seconds

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": str(self.loss),
            "metrics": {name: [str(value), n] for name, (value, n) in self.metrics.items()},
            "samples": self.samples,
            "seconds": self.seconds,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Sums:
        metrics = {name: (_read(value), n) for name, (value, n) in state["metrics"].items()}
        loss = _read(state["loss"])
        is_unknown = isinstance(loss, float)
        ratio = (0 if is_unknown else loss).as_integer_ratio()
        return cls(*ratio, is_unknown, metrics, state["samples"], state["seconds"])


def _find_stack_level() -> int:
    """Return the `stacklevel` with which the caller's warning shows the line of the user's code."""
    frame = sys._getframe(1)
    level = 1
    while not is_user_code(frame.f_code.co_filename):
        if frame.f_back is None:
            return 2
        frame = frame.f_back
        level = level + 1
    return level


def _exact(value: float) -> Fraction | float:
    """Return a number exactly; NaN and infinity, which no fraction is, as they are."""
    return Fraction(value) if math.isfinite(value) else value


def _read(text: str) -> Fraction | float:
    """Return the number that `str` has written."""
    return float(text) if text in ("nan", "inf", "-inf") else Fraction(text)


def describe_step(result: StepResult) -> dict[str, Any]:
    """Return the fields of the line of a step; floats that identify it in `float.hex` form, too."""
    fields = _without_none(vars(result))
    if result.losses:
        fields["losses"] = [None if loss is None else loss.hex() for loss in result.losses]
    else:  # of many ranks
        del fields["losses"]
    return fields | {"loss_hex": result.loss.hex(), "norm_hex": result.norm.hex()}


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _identify(kind: str, fields: Mapping[str, Any]) -> tuple[str, Any]:
    return kind, fields.get(IDENTITIES.get(kind, ""))


def _read_identities(path: Path) -> set[tuple[str, Any]]:
    """Return the identities of the last lines of a record."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    identities = set()
    for line in lines:
        try:
            fields = orjson.loads(line)
            identities.add(_identify(str(fields.get("kind")), fields))
        except (ValueError, TypeError, AttributeError):  # incomplete, such as the first, or damaged
            continue
    return identities
