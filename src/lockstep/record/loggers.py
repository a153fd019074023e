"""Loggers, which receive the lines of the record.

    Trainer(..., loggers=["runs/night", ls.loggers.TensorBoard("tensorboard/night")])

In addition to the record itself and the progress display, the lines can be sent to TensorBoard,
Weights & Biases and MLflow. All three use the same names:

    loss, lr, seconds, samples_per_second, and metrics by name        per step
    compute, communication, waiting, data    seconds, rank mean       per step
    held_out/loss, held_out/accuracy, ...                             per epoch

Only rank 0 writes lines. A dashboard's logger opens its run when it receives the first line. If it
fails, it prints one message and is disabled; the training continues.

In a resumed run the first line is "resume" instead of "run"; in a process that becomes rank 0 of an
elastic run it is "round". The logger then continues the dashboard's run, whose id the first process
stored in RUN/dashboards.json:

    TensorBoard    hides what was logged from the resumed step on (purge_step)
    WandB          wandb.init(id=..., resume="allow"); W&B keeps the first value of a step
    MLflow         mlflow.start_run(run_id=...); MLflow keeps both values of a step

Repeated steps have bit-identical values; only their times differ.
"""

from __future__ import annotations

import abc
import base64
import importlib
import importlib.util
import io
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lockstep.files import replace_file
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import RUN, is_resuming
from lockstep.messages import log

__all__ = ["LOGGER_NAMES", "DashboardLogger", "Logger", "MLflow", "TensorBoard", "WandB"]
__all__ += ["collect_scalars", "create_logger"]

LOGGER_NAMES = ("tensorboard", "wandb", "mlflow")
IDS_FILE = "dashboards.json"


class Logger(Protocol):
    """An object that receives the lines of a record, such as a progress display."""

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line.

        Args:
            kind: "run", "resume", "round", "step", "epoch", "timeline", "checkpoint", "log",
                "warning" or "end".
            fields: The fields of the line.
        """

    def close(self) -> None:
        """Close the logger. Calling it again does nothing."""


def collect_scalars(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names that dashboards show."""
    if kind == "epoch":
        evaluation = fields.get("evaluation") or {}
        scalars = {"loss": evaluation.get("loss"), **(evaluation.get("metrics") or {})}
        group = "held_out_ema" if evaluation.get("ema") else "held_out"
        return _drop_missing({f"{group}/{name}": value for name, value in scalars.items()})
    if kind == "log":
        return _drop_missing({str(fields.get("name")): fields.get("value")})
    if kind != "step":
        return {}
    scalars = {name: fields.get(name) for name in ("loss", "lr", "seconds", "loss_scale")}
    scalars["gradient_norm"] = fields.get("norm")
    seconds = fields.get("seconds") or 0
    if seconds > 0:
        scalars["samples_per_second"] = fields.get("samples", 0) / seconds
    times = _mean_times(fields.get("ranks") or (), fields.get("rank_summary"))
    return _drop_missing(scalars | dict(fields.get("metrics") or {}) | times)


def _mean_times(
    rows: Sequence[Sequence[float]], summary: Mapping[str, Any] | None
) -> dict[str, float]:
    if not rows and not summary:
        return {}
    from lockstep.record.format import TIME_CATEGORIES  # late: commands need only the names

    columns = zip(*rows, strict=True)
    means = summary["mean"] if summary else [sum(column) / len(rows) for column in columns]
    return dict(zip(TIME_CATEGORIES, means, strict=False))


def _drop_missing(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


class DashboardLogger(abc.ABC):
    """The base class of the loggers that send to a dashboard.

    Args:
        every: Send every n-th step.

    Raises:
        UsageError: The package of the dashboard is not installed.
    """

    package = ""

    def __init__(self, every: int) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise UsageError(
                f"{type(self).__name__} needs the package {self.package}: "
                f"pip install {self.package}"
            )
        if every < 1:
            raise UsageError(
                f"{type(self).__name__}(every={every}): every must be at least 1 (every step)"
            )
        self.every = every
        self.failure: str | None = None
        """The message that was printed when the dashboard failed."""
        self.run_folder: Path | None = None
        """The folder of the run, which stores the id of the dashboard's run for later processes.
        The trainer sets it. None: the folder of `lockstep run`, if there is one."""
        self.resumed_step: int | None = None
        """The first step of a resumed run. None: the run was not resumed."""
        self._is_open = False
        self._header: dict[str, Any] = {}
        self._step = 0

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line. Never raises."""
        if self.failure is not None:
            return
        try:
            self._write(kind, fields)
        except Exception as error:
            self.failure = (
                f"{type(self).__name__} failed and is disabled, the training continues "
                f"({type(error).__name__}: {error})"
            )
            log(self.failure)

    def close(self) -> None:
        """Close the dashboard's run, as interrupted if there was no line "end"."""
        self.write("close")

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "run":
            self._header = fields
            if is_resuming() or self.package in self._stored_ids():
                return  # the folder already has a run, so a line "resume" follows
        if kind == "resume" or (kind == "round" and not self._is_open):  # this is a new rank 0
            self.resumed_step = int(fields.get("step") or 0)
            self._step = max(0, self.resumed_step - 1)  # for an evaluation before the next step
            self._header |= fields
            if self._is_open:
                self.rewind(self.resumed_step)
        if not self._is_open and kind != "close":
            self.open(self._header)
            self._is_open = True
        if kind == "step":
            self._step = fields.get("step", self._step + 1)
        scalars = collect_scalars(kind, fields)
        if scalars and (kind != "step" or self._step % self.every == 0):
            self.log_scalars(scalars, self._step)
        if kind == "log":
            self.log_media(fields, self._step)
        if kind == "warning":
            message = f"rank {fields.get('rank')}: {fields.get('message')}"
            self.log_text("warning", message, self._step)
        if kind in ("end", "close") and self._is_open:
            self._is_open = False
            self.finish(fields.get("state") == "done", str(fields.get("digest") or ""))

    def rewind(self, step: int) -> None:
        """Continue an open run at an earlier step; by default only log a text about it."""
        self.log_text("resumed", f"at step {step}", step)

    @abc.abstractmethod
    def open(self, header: dict[str, Any]) -> None:
        """Open the dashboard's run.

        If `resumed_step` is not None, continue the run that an earlier process opened.

        Args:
            header: The fields of the record's first line.
        """

    @abc.abstractmethod
    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of a step."""

    def log_media(self, fields: Mapping[str, Any], step: int) -> None:  # noqa: B027
        """Log the histogram or the image of a line "log"; by default they are left out."""

    @abc.abstractmethod
    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text."""

    @abc.abstractmethod
    def finish(self, done: bool, digest: str) -> None:
        """Close the run; `done` is False if it failed, stopped early or was interrupted."""

    def load_id(self) -> str | None:
        """Return the id of the dashboard's run that an earlier process stored, if any."""
        if self.resumed_step is None:
            return None
        run_id = self._stored_ids().get(self.package)
        return run_id if isinstance(run_id, str) else None

    def store_id(self, run_id: str) -> None:
        """Store the id of the dashboard's run, if the folder of the run is known."""
        if (path := self._ids_path()) is not None:
            with replace_file(path) as file:
                file.write(json.dumps(self._stored_ids() | {self.package: run_id}).encode())

    def _stored_ids(self) -> dict[str, Any]:
        path = self._ids_path()
        try:
            ids = json.loads(path.read_bytes()) if path is not None else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return ids if isinstance(ids, dict) else {}

    def _ids_path(self) -> Path | None:
        folder = self.run_folder or Path(os.environ.get(RUN) or os.devnull)
        return folder / IDS_FILE if folder.is_dir() else None


class TensorBoard(DashboardLogger):
    """A logger that writes TensorBoard's event files.

    Args:
        folder: The folder of the event files.
        every: Write every n-th step.
    """

    package = "tensorboard"

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self.folder = Path(folder)

    def open(self, header: dict[str, Any]) -> None:
        """Open the event file and write the header as texts."""
        from torch.utils.tensorboard import SummaryWriter

        step = self.resumed_step
        self._writer: Any = SummaryWriter(str(self.folder), purge_step=step)
        for name, value in _flatten_header(header).items():
            self._writer.add_text(f"run/{name}", str(value), step or 0)

    def rewind(self, step: int) -> None:
        """Hide what was logged from `step` on."""
        self._writer.close()
        self.open(self._header)

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Add scalars, including non-finite ones."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log_media(self, fields: Mapping[str, Any], step: int) -> None:
        """Add a histogram or an image."""
        name, histogram, image = fields["name"], fields.get("histogram"), fields.get("image")
        import numpy as np  # late: commands need only the names

        if histogram is not None:
            low, high = histogram["low"], histogram["high"]
            counts = np.array(histogram["counts"])
            edges = np.linspace(low, high, len(counts) + 1)
            middles = (edges[1:] + edges[:-1]) / 2
            sums = [float(counts @ middles**power) for power in (1, 2)]
            total = int(counts.sum())
            self._writer.add_histogram_raw(name, low, high, total, *sums, edges[1:], counts, step)
        if image is not None:
            from PIL import Image

            with Image.open(io.BytesIO(base64.b64decode(image))) as png:
                pixels = np.asarray(png)
            layout = "HW" if pixels.ndim == 2 else "HWC"
            self._writer.add_image(name, pixels, step, dataformats=layout)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Add a text."""
        self._writer.add_text(name, text, step)

    def finish(self, done: bool, digest: str) -> None:
        """Add the digest and close the file."""
        if digest:
            self._writer.add_text("digest", digest, self._step)
        self._writer.close()


class WandB(DashboardLogger):
    """A logger that sends to Weights & Biases.

    Args:
        every: Send every n-th step.
        options: Passed to `wandb.init`: `project`, `entity`, `mode`, ...
    """

    package = "wandb"

    def __init__(self, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self.options = options

    def open(self, header: dict[str, Any]) -> None:
        """Start a run whose config is the header, or continue it."""
        wandb: Any = importlib.import_module("wandb")
        config, options = _flatten_header(header), dict(self.options)
        if "id" not in options:
            options["id"] = self.load_id() or secrets.token_hex(8)
            self.store_id(options["id"])
        if self.resumed_step is None:
            self._run: Any = wandb.init(config=config, **options)
            return
        self._run = wandb.init(**{"resume": "allow"} | options)
        self._run.config.update(config, allow_val_change=True)  # the layout may have changed

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Log numbers."""
        self._run.log(values, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Add a text to the run's summary."""
        self._run.summary[f"{name} at step {step}"] = text

    def finish(self, done: bool, digest: str) -> None:
        """Add the digest to the run's summary and finish the run."""
        self._run.summary["digest"] = digest
        self._run.finish(exit_code=0 if done else 1)


class MLflow(DashboardLogger):
    """A logger that sends to MLflow, at its tracking URI.

    Args:
        every: Send every n-th step. The default is 10, because each line is a transaction that
            takes a few milliseconds.
        options: Passed to `mlflow.start_run`.
    """

    package = "mlflow"

    def __init__(self, *, every: int = 10, **options: Any) -> None:
        super().__init__(every)
        self.options = options

    def open(self, header: dict[str, Any]) -> None:
        """Start a run whose parameters are the header, or continue it.

        MLflow's parameters cannot change, so those of a resumed run are stored as a tag.
        """
        self._mlflow: Any = importlib.import_module("mlflow")
        options = dict(self.options)
        if "run_id" not in options and (known := self.load_id()) is not None:
            options["run_id"] = known
        started = self._mlflow.start_run(**options)
        self.store_id(str(started.info.run_id))
        if self.resumed_step is None or "run_id" not in options:
            self._mlflow.log_params(_flatten_header(header))
        else:
            layout = _flatten_header({"layout": header.get("layout")})
            text = ", ".join(f"{name}: {value}" for name, value in layout.items())
            self.log_text("resumed", text, self.resumed_step)

    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Log metrics; MLflow cannot store non-finite ones."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Set a tag."""
        self._mlflow.set_tag(f"{name} at step {step}", text)

    def finish(self, done: bool, digest: str) -> None:
        """Set the digest as a tag and end the run."""
        self._mlflow.set_tag("digest", digest)
        self._mlflow.end_run("FINISHED" if done else "FAILED")


def create_logger(name: str, folder: Path) -> DashboardLogger:
    """Return a logger of `LOGGER_NAMES` for the run in `folder`.

    TensorBoard's event files are in the folder `tensorboard` of the run. W&B and MLflow show the
    run under its name, in the project or experiment that their environment variables select.

    Raises:
        UsageError: The package of the dashboard is not installed.
    """
    logger: DashboardLogger
    if name == "tensorboard":
        logger = TensorBoard(folder / "tensorboard")
    elif name == "wandb":
        logger = WandB(name=folder.name)
    else:
        logger = MLflow(run_name=folder.name)
    logger.run_folder = folder
    return logger


def _flatten_header(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header's settings under dotted names, as a dashboard's parameters."""
    settings: dict[str, Any] = {}
    for name in ("recipe", "command", "epochs", "steps_per_epoch", "samples"):
        if name in header:
            value = header[name]
            settings[name] = (
                " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            )
    for part in ("layout", "options", "model", "optimizer", "environment"):
        for name, value in (header.get(part) or {}).items():
            settings[f"{part}.{name}"] = value if isinstance(value, (int, float)) else str(value)
    return settings
