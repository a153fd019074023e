"""The history of a training, reported to callbacks and loggers."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import orjson
import torch

from lockstep.errors import UsageError
from lockstep.launcher.run_folder import command_words
from lockstep.launcher.world import World
from lockstep.model.evaluation import Evaluation
from lockstep.model.parallel_context import ParallelContext
from lockstep.record.environment import describe_environment
from lockstep.record.loggers import Logger
from lockstep.record.program import describe_data, describe_program
from lockstep.record.progress import ScriptProgress
from lockstep.record.recorder import RECORD_FILE, Recorder
from lockstep.redaction import redact
from lockstep.training.optimization import Optimization
from lockstep.training.rank_status import RankStatus

__all__ = [
    "Callback",
    "EpochResult",
    "History",
    "OnEpoch",
    "OnStep",
    "StepResult",
    "compute_rank_times",
    "describe_run",
]

NUMBERS = ("step", "epoch", "timeline")  # lines that hold nothing but numbers
TAIL_BYTES = 1 << 17  # of the record, in which lines of the dead rank 0 are looked for

IDENTITIES = {"step": "step", "epoch": "epoch", "warning": "message"}
"""Kinds of lines that a new rank 0 writes if they are missing, and what identifies one."""
BACKLOG = 16  # lines that it keeps


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Times in seconds; `ranks` as `compute_rank_times` gives them.

    `loss` is the batch's loss before the step, `metrics` means over its samples,
    `norm` the whole gradient's 2-norm before clipping. `loss_scale` is the scale of the
    loss, and `is_skipped` whether gradients overflowed, so that the weights did not change;
    None without float16 autocast. `losses` are those of the micro-batches; None for one that
    has no weight and was not computed. `batch` is a hash of the batch's sample indices, or of its
    content if it does not come from `trainer.batches`; None where neither is known.
    """

    step: int
    epoch: int
    loss: float
    samples: int
    metrics: dict[str, float]
    lr: float
    seconds: float = 0.0
    ranks: list[list[float]] = field(default_factory=list)
    norm: float = 0.0
    loss_scale: float | None = None
    is_skipped: bool | None = None
    losses: list[float | None] = field(default_factory=list)
    batch: str | None = None


@dataclass(frozen=True)
class EpochResult:
    """One epoch: means over its samples, as they were during training."""

    epoch: int
    loss: float
    metrics: dict[str, float]
    samples: int
    seconds: float
    evaluation: Evaluation | None = None


def compute_rank_times(
    statuses: Sequence[RankStatus], exchanged: float, reduced: float, updated: float
) -> list[list[float]]:
    """Return [compute, communication, waiting, data] of a step for every rank.

    Ranks begin a step together, since the previous one ended with an exchange. Each
    reports the time of its data and of its forward and backward; the time until the
    last rank arrived is waiting. The rest of this rank's time in the exchange, and the
    reduction after it, is communication, taken to be the same for all ranks.
    A stage also waits for its neighbours.
    """
    arrivals = [each.data + each.compute + each.idle for each in statuses]
    last = max(arrivals)
    rows = []
    for each, arrival in zip(statuses, arrivals, strict=True):
        waiting = last - arrival
        communication = max(0.0, exchanged - waiting) + reduced if len(statuses) > 1 else 0.0
        rows.append([each.compute + updated, communication, waiting + each.idle, each.data])
    return rows


class OnStep(Protocol):
    """A callback with a method for every step."""

    def on_step(self, result: StepResult, /) -> None:
        """Take in a step that was committed."""


class OnEpoch(Protocol):
    """A callback with a method for every epoch."""

    def on_epoch(self, result: EpochResult, /) -> None:
        """Take in an epoch whose last batch was trained."""


Callback = Callable[[StepResult], None] | OnStep | OnEpoch
"""A function of a `StepResult`, or an object with `on_step(result)` or `on_epoch(result)`."""


class History:
    """Collects steps into epochs, and tells callbacks and loggers.

    An epoch's line waits for its evaluation: it is written when the next step,
    evaluation or the end comes.
    """

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        callbacks: Callback | Sequence[Callback] = (),
        progress: ScriptProgress | None = None,
    ) -> None:
        self.loggers = list(loggers)
        self.progress = progress
        self._on_step, self._on_epoch = _split_callbacks(callbacks)
        self._open = _Sums()
        self._pending: EpochResult | None = None
        self._memory: list[int] = []
        self._warned: set[str] = set()
        self._data: list[list[dict[str, Any]]] = []  # files of the datasets that were used
        self.samples = 0
        self.epochs = 0
        """How many epochs the record has."""
        self.last: StepResult | None = None
        self.failures: list[str] = []
        """How the latest step failed; empty if it did not."""
        self._backlog: deque[tuple[str, dict[str, Any]]] | None = None

    def keep_backlog(self) -> None:
        """Keep the last lines on a rank that may have to write them for a rank 0 that is lost.

        No rank is more than one operation ahead of another, so a few lines are enough.
        """
        self._backlog = deque(maxlen=BACKLOG)

    def take_backlog(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines that were kept; none are kept from now on."""
        kept, self._backlog = self._backlog, None
        return list(kept or ())

    @property
    def backlog(self) -> list[tuple[str, dict[str, Any]]]:
        """The lines that were kept."""
        return list(self._backlog or ())

    def write_missing(self, lines: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Write those of some lines that a rank 0 which is lost did not come to write."""
        folder = self.find_run_folder()
        if folder is None:
            return
        known = _read_identities(folder / RECORD_FILE)
        for kind, fields in lines:
            if _identify(kind, fields) not in known:
                self.write(kind, **fields)

    def find_run_folder(self) -> Path | None:
        """Return the folder in which the run is recorded; None if it is not."""
        recorders = (each for each in self.loggers if isinstance(each, Recorder))
        return next((each.folder.absolute() for each in recorders), None)

    def write(self, kind: str, **fields: Any) -> None:
        """Give one line to every logger, without the secrets that it may hold."""
        if self._backlog is not None and kind in IDENTITIES:
            self._backlog.append((kind, fields))
        if kind not in NUMBERS:
            fields = redact(fields)
        for logger in self.loggers:
            logger.write(kind, **fields)

    @property
    def steps(self) -> int:
        """How many steps the record has."""
        return 0 if self.last is None else self.last.step + 1

    @property
    def _has_readers(self) -> bool:
        return bool(self.loggers) or self._backlog is not None

    def step(self, result: StepResult, memory: Sequence[int]) -> None:
        """Take one step, and each rank's peak memory in bytes."""
        self.flush()
        self.failures.clear()
        self._memory = list(memory)
        self._open.add(result)
        self.samples += result.samples
        self.last = result
        if self._has_readers:
            self.write("step", **_without_none(vars(result) | _exact(result)))
        if self.progress is not None:
            self.progress.step(**vars(result))
        for callback in self._on_step:
            callback(result)

    def add_data(self, dataset: object) -> None:
        """Write the files that a dataset names, when it is used for the first time."""
        if not self.loggers:
            return
        files = describe_data(dataset)
        if files and files not in self._data:
            self._data.append(files)
            self.write("data", dataset=type(dataset).__name__, files=files)

    def begin_epoch(self, epoch: int, steps: int | None, done: int = 0) -> None:
        """Begin an epoch of `steps` steps, and forget one that was broken off.

        If the epoch is resumed, `done` of its steps were taken before, and still count.
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
        """Close the epoch; None if it had no step. Callbacks are told by `notify`."""
        steps, self._open = self._open, _Sums()
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
        if self.progress is not None:
            self.progress.epoch(**asdict(self._pending))
        return self._pending

    def notify(self, result: EpochResult) -> None:
        """Call the callbacks of an epoch."""
        for callback in self._on_epoch:
            callback(result)

    def state_dict(self) -> dict[str, Any]:
        """Return what the history goes on from, as plain numbers and texts.

        That is the sums of the open epoch, the epoch that waits for its evaluation, the last
        step, and the numbers of samples and of epochs in the record.
        """
        return {
            "open": self._open.state_dict(),
            "pending": None if self._pending is None else asdict(self._pending),
            "last": None if self.last is None else asdict(self.last),
            "samples": self.samples,
            "epochs": self.epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._open = _Sums.from_state(state["open"])
        pending, last = state.get("pending"), state.get("last")
        if pending is not None and pending["evaluation"] is not None:
            pending = {**pending, "evaluation": Evaluation(**pending["evaluation"])}
        self._pending = None if pending is None else EpochResult(**pending)
        self.last = None if last is None else StepResult(**last)
        self.samples, self.epochs = state.get("samples", 0), state.get("epochs", 0)

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the epoch that was just closed."""
        if self._pending is not None:
            if self.progress is not None:
                self.progress.evaluation(evaluation.loss, evaluation.metrics)
            self._pending = replace(self._pending, evaluation=evaluation)
            self.flush()

    def flush(self) -> None:
        """Write the epoch's line, if one waits."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.epochs += 1
        if self._has_readers:
            self.write("epoch", **_without_none(asdict(pending)), memory_bytes=self._memory)

    def warn(self, rank: int, message: str, show: bool) -> None:
        """Write a warning to the record, and show it, once whatever its place."""
        place, _, sentence = message.partition(": ")
        if sentence not in self._warned:
            self._warned.add(sentence)
            if show:
                warnings.warn(f"{place}: {sentence}", stacklevel=2)
            self.write("warning", rank=rank, message=message)

    def close(self, **fields: Any) -> None:
        """Write the last line and close the loggers."""
        self.flush()
        if self.progress is not None:
            self.progress.close()
        if self.last is not None:
            fields |= {"loss": self.last.loss, "metrics": self.last.metrics}
        self.write("end", **_without_none(fields | {"samples": self.samples}))
        for logger in self.loggers:
            logger.close()
        self.loggers = []


def _split_callbacks(callbacks: Callback | Sequence[Callback]) -> tuple[list[Any], list[Any]]:
    """Return what is called after every step, and after every epoch."""
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    on_step, on_epoch = [], []
    for each in given:
        methods = getattr(each, "on_step", None), getattr(each, "on_epoch", None)
        if methods == (None, None) and not callable(each):
            raise UsageError(
                f"callbacks: a {type(each).__name__} is neither a function that takes a StepResult "
                "nor an object with a method on_step(result) or on_epoch(result)"
            )
        on_step += [methods[0] or each] if methods[0] or methods[1] is None else []
        on_epoch += [methods[1]] if methods[1] else []
    return on_step, on_epoch


def describe_run(
    world: World, parallel: ParallelContext, optimization: Optimization, seed: int, trainer: int
) -> dict[str, Any]:
    """Return the fields of the first line; `trainer` is the trainer's number in the program."""
    module = optimization.module
    return {
        "command": command_words(os.environ, sys.argv),
        "program": describe_program(),
        "seed": seed,
        "torch_seed": torch.initial_seed(),  # a random one where the program sets none
        "trainer": trainer,
        "layout": {
            "world_size": world.world_size,
            "replicas": parallel.replicas,
            "stages": parallel.stages,
            "microbatches": parallel.microbatches,
            "threads": parallel.threads,
            "backend": world.backend,
            "device": str(world.device),
            "storage": "replicated" if optimization.sharded is None else "shared",
        },
        "environment": describe_environment(),
        "model": {
            "class": type(module).__name__,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "buffers": sum(buffer.numel() for buffer in module.buffers()),
            "gradient_bytes": sum(
                each.nbytes for each in module.parameters() if each.requires_grad
            ),
        },
        "optimizer": optimization.options(),
    }


@dataclass
class _Sums:
    """What an epoch has added up so far, exactly, so that resuming changes no bit."""

    loss: Fraction = Fraction(0)
    metrics: dict[str, tuple[Fraction, int]] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult) -> None:
        self.loss += Fraction(result.loss) * result.samples
        for name, value in result.metrics.items():
            total, samples = self.metrics.get(name, (Fraction(0), 0))
            self.metrics[name] = total + Fraction(value) * result.samples, samples + result.samples
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
        metrics = {name: (Fraction(value), n) for name, (value, n) in state["metrics"].items()}
        return cls(Fraction(state["loss"]), metrics, state["samples"], state["seconds"])


def _exact(result: StepResult) -> dict[str, Any]:
    """Return the numbers that identify a step, in `float.hex` form."""
    losses = [None if loss is None else loss.hex() for loss in result.losses]
    return {"loss_hex": result.loss.hex(), "norm_hex": result.norm.hex(), "losses": losses}


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _identify(kind: str, fields: Mapping[str, Any]) -> tuple[str, Any]:
    return kind, fields.get(IDENTITIES.get(kind, ""))


def _read_identities(path: Path) -> set[tuple[str, Any]]:
    """Return what identifies the last lines of a record."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    found = set()
    for line in lines:
        try:
            fields = orjson.loads(line)
        except ValueError:  # the first one is cut
            continue
        found.add(_identify(str(fields.get("kind")), fields))
    return found
