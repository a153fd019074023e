"""Evaluation: every sample counted once, the same numbers on every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.transfer import all_gather_bytes
from lockstep.data.loader import Batches
from lockstep.errors import LossError
from lockstep.train.buffers import Buffers
from lockstep.train.forward import Metric, check_scalar, forward
from lockstep.train.setting import Setting
from lockstep.train.units import Units
from lockstep.train.weight import is_sum

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """The outcome: mean loss and mean metrics over `samples` samples."""

    loss: float
    metrics: dict[str, float]
    samples: int


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and each back into the mode it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def evaluate(
    model: nn.Module,
    batches: Batches,
    setting: Setting,
    metrics: Mapping[str, Metric],
    seed: int,
) -> Evaluation:
    """Compute this rank's micro-batches and combine those of all ranks.

    The loss is the mean over all samples (their sum for a loss that adds; the
    weighted mean where there is a weight function). Each micro-batch counts with
    its own numbers and the sums are exact, so the layout changes no bit.
    """
    rows: list[tuple[int, float, float, dict[str, float]]] = []
    units = Units(model, seed, setting.device)
    buffers = Buffers(setting.modules_with(model))
    with _evaluating(model), units.seeded():
        for number, batch in enumerate(batches):
            for microbatch in batch.microbatches:
                units.begin(-1 - number, microbatch.index)  # keys that no training step has
                data = setting.moved(microbatch.data)
                place = f"rank {setting.rank}, evaluation batch {number}, {microbatch.index}"
                # Even in evaluation a module may count or collect: on a copy.
                with buffers.untouched(), setting.autocast():
                    loss, values = forward(model, setting.loss, metrics, data, place)
                check_scalar(loss, place)
                weight = _weight(setting, microbatch.size, microbatch.data)
                numbers = {name: float(value) for name, value in values.items()}
                rows.append((microbatch.size, weight, float(loss) if weight else 0.0, numbers))
    gathered = [
        row
        for message in all_gather_bytes(json.dumps(rows).encode(), "evaluating", setting.group)
        for row in json.loads(message)
    ]
    samples = sum(size for size, _, _, _ in gathered)
    loss = math.fsum(weight * loss for _, weight, loss, _ in gathered)
    whole = math.fsum(row[1] for row in gathered)
    if whole == 0:
        raise LossError(
            f"the weights of the {samples} samples add up to 0, so their loss has no mean; does "
            "every one have its target ignored?"
        )
    return Evaluation(
        loss=loss if is_sum(setting.loss) else loss / whole,
        metrics={
            name: math.fsum(size * values[name] for size, _, _, values in gathered) / samples
            for name in gathered[0][3]
        },
        samples=samples,
    )


def _weight(setting: Setting, size: int, data: Any) -> float:
    if is_sum(setting.loss):
        return 1.0
    weight: Callable[[Any], float] | None = setting.weight
    return float(size) if weight is None else float(weight(data))
