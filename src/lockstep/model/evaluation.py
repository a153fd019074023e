"""Evaluation: every sample counted once, the same numbers on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives import all_gather_bytes
from lockstep.data.microbatch import Batch, Microbatch
from lockstep.errors import LossError, StoppedError
from lockstep.model.buffers import Buffers
from lockstep.model.compilation import static_shapes
from lockstep.model.forward import Metric, check_scalar, forward
from lockstep.model.loss_weight import is_sum
from lockstep.model.parallel_context import ParallelContext
from lockstep.model.units import Units, units_of

__all__ = ["Evaluation", "Row", "combined", "evaluate", "evaluating", "row"]


@dataclass(frozen=True)
class Evaluation:
    """The outcome: mean loss and mean metrics over `samples` samples."""

    loss: float
    metrics: dict[str, float]
    samples: int


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), static_shapes():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


Row = tuple[int, float, float, dict[str, float]]
"""Of a micro-batch: its samples, its weight, its loss, its metrics."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    parallel: ParallelContext,
    metrics: Mapping[str, Metric],
    seed: int,
    names: Sequence[str] = (),
) -> Evaluation:
    """Compute this rank's micro-batches and combine those of all ranks.

    `names` are those of the model's blocks. The loss is the mean over all samples
    (their sum for a loss that adds; the weighted mean where there is a weight
    function). Each micro-batch counts with its own numbers and the sums are exact, so
    the layout changes no bit.
    """
    rows: list[Row] = []
    units = Units(units_of(model, names), model, seed, parallel.device)
    buffers = Buffers(parallel.modules_with(model))
    with evaluating(model), units.seeded():
        for number, batch in enumerate(batches):
            for microbatch in batch.microbatches:
                units.begin(-1 - number, microbatch.index)  # keys that no training step has
                data = parallel.moved(microbatch.data)
                place = f"rank {parallel.rank}, evaluation batch {number}, {microbatch.index}"
                # Even in evaluation a module may count or collect: on a copy.
                with buffers.untouched(), parallel.autocast():
                    loss, values = forward(model, parallel.loss, metrics, data, place)
                rows.append(row(parallel, microbatch, loss, values, place))
    return combined(rows, parallel)


def row(
    parallel: ParallelContext,
    microbatch: Microbatch,
    loss: Any,
    metrics: Mapping[str, Any],
    place: str,
) -> Row:
    """Return what one micro-batch contributes."""
    check_scalar(loss, place)
    weight = _weight(parallel, microbatch.size, microbatch.data)
    numbers = {name: float(value) for name, value in metrics.items()}
    return microbatch.size, weight, float(loss) if weight else 0.0, numbers


def combined(rows: Sequence[Row], parallel: ParallelContext, failure: str = "") -> Evaluation:
    """Return the evaluation that all ranks' rows make, on every rank.

    With a `failure` on some rank, StoppedError on every one.
    """
    message = json.dumps([failure, rows]).encode()
    everyone = [
        json.loads(each) for each in all_gather_bytes(message, "evaluating", parallel.group)
    ]
    for said, _ in everyone:
        if said:
            raise StoppedError(f"rank {parallel.rank} stopped because {said}")
    gathered = [each for _, theirs in everyone for each in theirs]
    samples = sum(size for size, _, _, _ in gathered)
    loss = math.fsum(weight * loss for _, weight, loss, _ in gathered)
    whole = math.fsum(each[1] for each in gathered)
    if whole == 0:
        raise LossError(
            f"the weights of the {samples} samples add up to 0, so their loss has no mean; does "
            "every one have its target ignored?"
        )
    return Evaluation(
        loss=loss if is_sum(parallel.loss) else loss / whole,
        metrics={
            name: math.fsum(size * values[name] for size, _, _, values in gathered) / samples
            for name in gathered[0][3]
        },
        samples=samples,
    )


def _weight(parallel: ParallelContext, size: int, data: Any) -> float:
    if is_sum(parallel.loss):
        return 1.0
    weight: Callable[[Any], float] | None = parallel.loss_weight
    return float(size) if weight is None else float(weight(data))
