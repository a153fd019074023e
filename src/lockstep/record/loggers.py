"""Loggers, which receive the lines of the record.

    Trainer(..., loggers=["runs/night", ls.loggers.TensorBoard("tensorboard/night")])

In addition to the record itself and the progress display, the lines can be sent to TensorBoard:

    loss, lr, seconds, samples_per_second, and metrics by name        per step
    compute, communication, waiting, data    seconds, rank mean       per step
    held_out/loss, held_out/accuracy, ...                             per epoch

Only rank 0 writes lines.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.call_checks import check_call
from lockstep.kernel.errors import UsageError
from lockstep.messages import log
from lockstep.record.columns import TIME_CATEGORIES

__all__ = ["Logger", "TensorBoard", "collect_scalars"]


class Logger(Protocol):
    """An object that receives the lines of a record, such as a progress display."""

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line.

        Args:
            kind: "run", "resume", "round", "step", "epoch", "checkpoint", "log", "warning" or
                "end".
            fields: The fields of the line.
        """

    def close(self) -> None:
        """Close the logger. Calling it again does nothing."""


class TensorBoard:
    """A logger that writes TensorBoard's event files.

    The files are opened when the logger receives the first line. A resumed run, or the next round
    of an elastic run, hides what was logged from the repeated step on. If the logger fails, it
    prints one message and is disabled; the training continues.

    Args:
        folder: The folder of the event files.
        every: Write every n-th step.

    Raises:
        UsageError: The package tensorboard is not installed, or `every` is less than 1.
    """

    @check_call("TensorBoard")
    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise UsageError("TensorBoard needs the package tensorboard: pip install tensorboard")
        if every < 1:
            raise UsageError(f"TensorBoard(every={every}): every must be at least 1 (every step)")
        self.folder = Path(folder)
        self.every = every
        self.failure: str | None = None
        """The message that was printed when the logger failed."""
        self._writer: Any = None
        self._step = 0

    def write(self, kind: str, /, **fields: Any) -> None:
        """Write one line. Never raises."""
        if self.failure is not None:
            return
        try:
            self._write(kind, fields)
        except Exception as error:
            self.failure = (
                "TensorBoard failed and is disabled, the training continues "
                f"({type(error).__name__}: {error})"
            )
            log(self.failure)

    def close(self) -> None:
        """Close the event files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in ("run", "resume", "round"):
            self._open(kind, fields)
        if kind == "step":
            self._step = fields["step"]
        if kind != "step" or self._step % self.every == 0:
            for name, value in collect_scalars(kind, fields).items():
                self._writer.add_scalar(name, value, self._step)
        if kind == "log":
            self._add_media(fields)
        if kind == "warning":
            text = f"rank {fields.get('rank')}: {fields.get('message')}"
            self._writer.add_text("warning", text, self._step)
        if kind == "end":
            self._writer.add_text("digest", str(fields.get("digest") or ""), self._step)
            self.close()

    def _open(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Open an event file at the first step that the line begins or repeats."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        step = None if kind == "run" else int(fields.get("step") or 0)
        self._writer = SummaryWriter(str(self.folder), purge_step=step)
        self._step = max(0, (step or 0) - 1)  # for an evaluation before the next step
        text = json.dumps(fields, indent=1, default=str)
        self._writer.add_text(kind, f"```\n{text}\n```", step or 0)

    def _add_media(self, fields: Mapping[str, Any]) -> None:
        """Add the histogram or the image of a line "log"."""
        name = fields["name"]
        histogram = fields.get("histogram")
        image = fields.get("image")
        if histogram is not None:
            low = histogram["low"]
            high = histogram["high"]
            counts = np.array(histogram["counts"])
            edges = np.linspace(low, high, len(counts) + 1)
            middles = (edges[1:] + edges[:-1]) / 2
            sums = [float(counts @ middles**power) for power in (1, 2)]
            bins = (int(counts.sum()), *sums, edges[1:], counts)
            self._writer.add_histogram_raw(name, low, high, *bins, self._step)
        if image is not None:
            from PIL import Image

            with Image.open(io.BytesIO(base64.b64decode(image))) as png:
                pixels = np.asarray(png)
            layout = "HW" if pixels.ndim == 2 else "HWC"
            self._writer.add_image(name, pixels, self._step, dataformats=layout)


def collect_scalars(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line under the names that TensorBoard shows."""
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
    times = _mean_times(fields.get("ranks") or ())
    return _drop_missing(scalars | dict(fields.get("metrics") or {}) | times)


def _mean_times(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return dict(zip(TIME_CATEGORIES, means, strict=False))


def _drop_missing(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}
