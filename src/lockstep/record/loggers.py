"""Dashboards: the same lines, sent to TensorBoard, Weights & Biases or MLflow as well.

    Trainer(..., record=["runs/night", ls.TensorBoard("tensorboard/night")])

All three get the same names:

    loss, lr, seconds, samples_per_second, and the metrics by their names    each step
    compute, communication, waiting, data      seconds, mean over the ranks  each step
    held_out/loss, held_out/accuracy, ...                                    each epoch

A dashboard is opened by the first line it gets, which only rank 0 writes. One
that fails says so once and is left out; the training goes on.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.messages import say
from lockstep.record.recorder import PARTS

__all__ = ["Dashboard", "MLflow", "TensorBoard", "WandB", "scalars"]


def scalars(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names that every dashboard shows."""
    if kind == "epoch":
        evaluation = fields.get("evaluation") or {}
        found = {"loss": evaluation.get("loss"), **(evaluation.get("metrics") or {})}
        return numbers({f"held_out/{name}": value for name, value in found.items()})
    if kind != "step":
        return {}
    found = {name: fields.get(name) for name in ("loss", "lr", "seconds")}
    seconds = fields.get("seconds") or 0
    if seconds > 0:
        found["samples_per_second"] = fields.get("samples", 0) / seconds
    return numbers(found | dict(fields.get("metrics") or {}) | parts(fields.get("ranks") or ()))


def parts(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the means over the ranks of what a step's seconds were spent on."""
    return {name: sum(row[at] for row in rows) / len(rows) for at, name in enumerate(PARTS) if rows}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Keep what is a number."""
    return {name: float(value) for name, value in values.items() if value is not None}


class Dashboard(abc.ABC):
    """A writer of the record's lines to a dashboard; `every` thins the steps' lines.

    Raises UsageError at once where the dashboard's package is not installed.
    """

    package = ""
    extra = ""

    def __init__(self, every: int) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UsageError(
                f"{type(self).__name__} needs the package {self.package}: "
                f"pip install 'torch-lockstep[{self.extra}]'"
            )
        if every < 1:
            raise UsageError(f"{type(self).__name__}(every={every}): every first step is the most")
        self.every = every
        self.failure: str | None = None
        """The sentence that was printed when the dashboard could no longer be written."""
        self._opened = False
        self._step = 0

    def write(self, kind: str, /, **fields: Any) -> None:
        """Take a line as the record does. Never raises."""
        if self.failure is not None:
            return
        try:
            self._take(kind, fields)
        except Exception as error:
            self.failure = (
                f"{type(self).__name__} is left out from here on, "
                f"the training goes on ({type(error).__name__}: {error})"
            )
            say(self.failure)

    def close(self) -> None:
        """Close the dashboard's run, as interrupted if it had no end."""
        self.write("close")

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        if not self._opened and kind != "close":
            self.open(fields if kind == "run" else {})
            self._opened = True
        if kind == "step":
            self._step = fields.get("step", self._step + 1)
        if (found := scalars(kind, fields)) and (kind != "step" or self._step % self.every == 0):
            self.log(found, self._step)
        if kind == "warning":
            self.say("warning", f"rank {fields.get('rank')}: {fields.get('message')}", self._step)
        if kind in ("end", "close") and self._opened:
            self._opened = False
            self.finish(fields.get("state") == "done", str(fields.get("digest") or ""))

    @abc.abstractmethod
    def open(self, header: dict[str, Any]) -> None:
        """Open the dashboard's run; `header` is the record's first line."""

    @abc.abstractmethod
    def log(self, values: dict[str, float], step: int) -> None:
        """Show numbers at a step."""

    @abc.abstractmethod
    def say(self, name: str, sentence: str, step: int) -> None:
        """Show a sentence."""

    @abc.abstractmethod
    def finish(self, done: bool, digest: str) -> None:
        """Close the run; `done` is false for one that failed or was interrupted."""


class TensorBoard(Dashboard):
    """Writes TensorBoard's event files into `folder`."""

    package, extra = "tensorboard", "tensorboard"

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self.folder = Path(folder)

    def open(self, header: dict[str, Any]) -> None:
        """Open the event file and show the header as text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self.folder))
        for name, value in settings(header).items():
            self._writer.add_text(f"run/{name}", str(value), 0)

    def log(self, values: dict[str, float], step: int) -> None:
        """Add scalars; a value that is not finite is shown as TensorBoard shows it."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def say(self, name: str, sentence: str, step: int) -> None:
        """Add a text."""
        self._writer.add_text(name, sentence, step)

    def finish(self, done: bool, digest: str) -> None:
        """Add the digest and close the file."""
        if digest:
            self._writer.add_text("digest", digest, self._step)
        self._writer.close()


class WandB(Dashboard):
    """Sends to Weights & Biases; `options` go to `wandb.init` (project, entity, mode, ...)."""

    package, extra = "wandb", "wandb"

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self.options = options

    def open(self, header: dict[str, Any]) -> None:
        """Start a run whose config is the header."""
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(config=settings(header), **self.options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Log numbers at a step."""
        self._run.log(values, step=step)

    def say(self, name: str, sentence: str, step: int) -> None:
        """Put a sentence into the summary."""
        self._run.summary[f"{name} at step {step}"] = sentence

    def finish(self, done: bool, digest: str) -> None:
        """Put the digest into the summary and finish the run."""
        self._run.summary["digest"] = digest
        self._run.finish(exit_code=0 if done else 1)


class MLflow(Dashboard):
    """Sends to MLflow, wherever its tracking URI points; `options` go to `start_run`.

    Each line is a transaction of some milliseconds, so by default every tenth step
    is sent.
    """

    package, extra = "mlflow", "mlflow"

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        super().__init__(every)
        self.options = options

    def open(self, header: dict[str, Any]) -> None:
        """Start a run whose parameters are the header."""
        self._mlflow: Any = importlib.import_module("mlflow")
        self._mlflow.start_run(**self.options)
        self._mlflow.log_params(settings(header))

    def log(self, values: dict[str, float], step: int) -> None:
        """Log metrics at a step; MLflow has no place for what is not finite."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step)

    def say(self, name: str, sentence: str, step: int) -> None:
        """Set a tag."""
        self._mlflow.set_tag(f"{name} at step {step}", sentence)

    def finish(self, done: bool, digest: str) -> None:
        """Tag the run with its digest and end it."""
        self._mlflow.set_tag("digest", digest)
        self._mlflow.end_run("FINISHED" if done else "FAILED")


def settings(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header's settings under dotted names, as dashboards want parameters."""
    found: dict[str, Any] = {}
    for name in ("recipe", "command", "epochs", "steps_per_epoch", "samples"):
        if name in header:
            value = header[name]
            found[name] = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    for part in ("layout", "options", "model", "environment"):
        for name, value in (header.get(part) or {}).items():
            found[f"{part}.{name}"] = value if isinstance(value, (int, float)) else str(value)
    return found
