"""The fingerprints of the steps of a run, read from its record.

Runs whose fingerprints are equal computed the same bits. Losses and norms are compared exactly, in
any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lockstep.record.columns import as_float
from lockstep.record.reader import open_record

__all__ = ["RecordedStep", "read_step_fingerprints"]


@dataclass(frozen=True)
class RecordedStep:
    """The fingerprint of one committed step.

    Attributes:
        step: The number of the step, from 0.
        epoch: The epoch of the step, from 0.
        loss: The loss of the batch, before the step. None: not recorded.
        norm: The 2-norm of the gradient before clipping. None: not recorded.
        losses: The loss of each micro-batch; None for a loss that was not computed. Empty in
            records of older versions.
        batch: A hash of the indices of the batch's samples, or of its content. None: not recorded.
    """

    step: int
    epoch: int
    loss: float | None
    norm: float | None
    losses: tuple[float | None, ...] = ()
    batch: str | None = None


def read_step_fingerprints(folder: Path) -> list[RecordedStep]:
    """Return the steps of a run in ascending order.

    A step that was repeated, by a resumed run or by the next round of an elastic run, replaces the
    earlier one. Lines that cannot be read are skipped; `read_run` counts them.

    Args:
        folder: The folder of the run, or the path of its record.

    Raises:
        UsageError: There is no record.
        FileError: The record cannot be read.
    """
    steps: list[RecordedStep] = []
    for line in _lines(folder):
        number = line.get("step")
        if not isinstance(number, int):
            continue
        while steps and steps[-1].step >= number:  # these steps are repeated
            steps.pop()
        if line["kind"] == "step":
            steps.append(_step(number, line))
    return steps


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    with open_record(folder) as file:
        for text in file:
            if b'"step"' not in text:
                continue
            try:
                line = orjson.loads(text)
            except orjson.JSONDecodeError:
                continue
            if isinstance(line, dict) and line.get("kind") in ("step", "resume", "round"):
                yield line


def _step(number: int, line: dict[str, Any]) -> RecordedStep:
    losses = line.get("losses")
    batch = line.get("batch")
    epoch = line.get("epoch")
    return RecordedStep(
        step=number,
        epoch=epoch if isinstance(epoch, int) else 0,
        loss=_exact(line, "loss"),
        norm=_exact(line, "norm"),
        losses=tuple(map(_parse, losses)) if isinstance(losses, list) else (),
        batch=batch if isinstance(batch, str) else None,
    )


def _exact(line: dict[str, Any], name: str) -> float | None:
    """Return a number of a line, from its `float.hex` form if there is one; None if missing."""
    number = _parse(line.get(f"{name}_hex"))
    if number is None and line.get(name) is not None:
        return as_float(line[name])
    return number


def _parse(text: Any) -> float | None:
    try:
        return float.fromhex(text)
    except (ValueError, TypeError):
        return math.nan if isinstance(text, str) else None
