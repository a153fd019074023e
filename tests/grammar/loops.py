"""Loops of the user's own: what they do with a micro-batch, one backward pass for each loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.kernel import spec


def noisy_inputs(model: Any, loss: Any, batch: Any) -> Iterator[torch.Tensor]:
    """Draw random numbers before the model is called."""
    *inputs, targets = batch
    inputs = [x + 0.1 * torch.randn_like(x) for x in inputs]
    yield loss(model(*inputs), targets)


def model_twice(model: Any, loss: Any, batch: Any) -> Iterator[torch.Tensor]:
    """Call the model again after the first backward pass."""
    *inputs, targets = batch
    yield loss(model(*inputs), targets)
    yield 0.5 * loss(model(*(x.flip(0) for x in inputs)), targets)


def two_losses(model: Any, loss: Any, batch: Any) -> Iterator[torch.Tensor]:
    """Go back through one graph twice."""
    *inputs, targets = batch
    outputs = model(*inputs)
    yield loss(outputs, targets)
    yield outputs.square().mean()


def _has_loss(model: Any, loss: Any) -> bool:
    return not loss.inside


def _takes_floats(model: Any, loss: Any) -> bool:
    return not loss.inside and model.family != "words"


LOOPS: dict[str, Callable[[Any, Any], bool]] = {
    "plain": lambda model, loss: True,
    "noisy_inputs": _takes_floats,
    "model_twice": _has_loss,
    "two_losses": _has_loss,
}
"""The loops by name, with what says whether a model and a loss fit one."""


def loop_of(name: str) -> Callable[[Any, Any, Any], Iterator[torch.Tensor]]:
    """Return the loop of this name."""
    return spec.losses_of if name == "plain" else globals()[name]
