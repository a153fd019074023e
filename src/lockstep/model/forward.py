"""The forward pass of one micro-batch: model, loss, metrics, and what can go wrong there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import LossError, UsageError
from lockstep.model.compilation import is_limit_error

__all__ = [
    "Metric",
    "accuracy",
    "called",
    "check_scalar",
    "forward",
    "measured",
    "own_loss",
    "parts",
]

Metric = Callable[[Any, Any], Any]
"""Gives a mean over a micro-batch's samples from (outputs, targets)."""


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the part of the samples whose largest output is at the target's class."""
    return (outputs.argmax(dim=1) == targets).to(torch.float64).mean()


def forward(
    model: nn.Module,
    loss: Callable[..., Any] | None,
    metrics: Mapping[str, Metric],
    data: Any,
    place: str,
) -> tuple[Any, dict[str, Any]]:
    """Return the loss of one micro-batch and its metrics.

    With a loss function, `data` is a tuple or list (inputs, ..., targets). Without
    one the model returns its loss, by itself, under "loss" or as `.loss`; then
    `data` may also be a mapping of keyword arguments, or one input.

    Raises LossError where the loss function raises, with what it was given.
    """
    if loss is None:
        return own_loss(called(model, data, place), place), {}
    inputs, targets = parts(data, place)
    return measured(loss, metrics, called(model, inputs, place), targets, place)


def parts(data: Any, place: str) -> tuple[list[Any], Any]:
    """Return the model's inputs and the targets; UsageError where a batch is no such pair."""
    if not isinstance(data, (tuple, list)) or len(data) < 2:
        raise UsageError(
            f"{place}: a batch for a loss function is a pair (inputs, targets), not a "
            f"{type(data).__name__}; for anything else use a loop of your own: "
            "with trainer.manual_step() as step"
        )
    *inputs, targets = data
    return inputs, targets


def measured(
    loss: Callable[..., Any],
    metrics: Mapping[str, Metric],
    outputs: Any,
    targets: Any,
    place: str,
) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the metrics of a micro-batch whose outputs are there."""
    try:
        value = loss(outputs, targets)
    except Exception as error:
        raise LossError(
            f"{place}: the loss {_name(loss)} failed on outputs {_describe(outputs)} and targets "
            f"{_describe(targets)}: {type(error).__name__}: {_first_line(error)}"
        ) from error
    with torch.no_grad():
        measured = {name: metric(outputs, targets) for name, metric in metrics.items()}
    for name, number in measured.items():
        if isinstance(number, torch.Tensor) and number.numel() != 1:
            raise UsageError(
                f"{place}: the metric {name} has shape {tuple(number.shape)}; it must be one "
                "number, a mean over the samples"
            )
    return value, measured


def check_scalar(loss: object, place: str) -> None:
    """Raise LossError unless a loss is a tensor with one number."""
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"{place}: the loss is a {type(loss).__name__}, not a tensor")
    if loss.numel() != 1:
        raise LossError(
            f"{place}: the loss has shape {tuple(loss.shape)}; it must be a scalar, so leave "
            'the loss at reduction="mean" or call .mean() on it'
        )


def called(model: nn.Module, data: Any, place: str) -> Any:
    """Return what a module makes of a mapping of arguments, a sequence of them, or one."""
    try:
        if isinstance(data, Mapping):
            return model(**data)
        return model(*data) if isinstance(data, (tuple, list)) else model(data)
    except Exception as error:
        if is_limit_error(error):
            raise UsageError(
                f"{place}: the compiled model met more different shapes than torch.compile keeps "
                "graphs for; pad the inputs to fewer shapes, or raise "
                "torch._dynamo.config.recompile_limit"
            ) from error
        if not isinstance(error, ValueError) or "more than 1 value per channel" not in str(error):
            raise
        raise UsageError(
            f"{place} holds one sample, and batch norm cannot train on one: choose the batch size "
            "and the number of micro-batches so that each holds at least two, in the last, short "
            "batch of an epoch too"
        ) from error


def own_loss(output: Any, place: str) -> Any:
    """Return the loss that a model returned; LossError where it returned none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    raise LossError(
        f"{place}: the trainer has no loss function, so the model must return its loss: a tensor, "
        f'a mapping with "loss" or an object with .loss, not a {type(output).__name__}'
    )


def _name(loss: object) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _describe(value: Any) -> str:
    """Describe a tensor by shape, dtype and, for whole numbers, range."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if value.numel() and not (value.is_floating_point() or value.is_complex()):
        text += f" with values {int(value.min())} to {int(value.max())}"
    return text
