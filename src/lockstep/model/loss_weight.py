"""Weights: what part of a batch's loss each micro-batch has.

The loss of a micro-batch is a mean over its n_m samples. Scaled by n_m / B, the
micro-batches add up to the mean over the batch, whether or not M divides B.
Some losses are means over something else: class weights, targets that are
ignored. There the share is w_m / (w_0 + w_1 + ...), with w_m given by a weight
function of the micro-batch, and a micro-batch of weight 0 is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["ignored_targets", "is_sum", "shares", "target_weight", "weight_of"]

WeightFunction = Callable[[Any], float]
"""Gives the weight of a micro-batch from its data, as the loader or the cut made it."""

IGNORED_BY_DEFAULT = -100
"""The `ignore_index` that torch's losses have unless told otherwise."""


def is_sum(loss: object) -> bool:
    """Tell whether a loss adds its samples instead of averaging them, so that nothing is scaled.

    Sees the `reduction` of a loss module, and the one bound by `functools.partial`.
    """
    return bool(_option(loss, "reduction", "mean") == "sum")


def _option(loss: object, name: str, default: Any) -> Any:
    bound = loss.keywords if isinstance(loss, partial) else {}
    return bound.get(name, getattr(loss, name, default))


def _is_classification(loss: object) -> bool:
    function = loss.func if isinstance(loss, partial) else loss
    known = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )
    return known and _option(loss, "reduction", "mean") == "mean"


def target_weight(loss: Callable[..., Any]) -> WeightFunction:
    """Return the weight function of a `CrossEntropyLoss` or `NLLLoss`: what its mean divides by.

    Counts the targets that are not `ignore_index`, each with its class weight.
    The micro-batch must be a tuple or list whose last entry holds class indices.
    """
    class_weights = _option(loss, "weight", None)
    ignored = _option(loss, "ignore_index", IGNORED_BY_DEFAULT)

    def weight(data: Any) -> float:
        targets = data[-1]
        if targets.is_floating_point():  # a distribution over classes: a mean over the samples
            return float(len(targets))
        kept = targets[targets != ignored]
        if class_weights is None:
            return float(kept.numel())
        return float(class_weights.to(torch.float64)[kept].sum())

    return weight


def weight_of(loss: object) -> WeightFunction | None:
    """Return the weight function that a loss needs by the way it was made, or None.

    Class weights, or an `ignore_index` of the user's own, say that the mean is
    not one over samples.
    """
    if not callable(loss) or not _is_classification(loss):
        return None
    ignored = _option(loss, "ignore_index", IGNORED_BY_DEFAULT)
    if _option(loss, "weight", None) is None and ignored == IGNORED_BY_DEFAULT:
        return None
    return target_weight(loss)


def ignored_targets(loss: object, data: Any) -> int:
    """Count the targets that a loss leaves out of its mean although no weight says so."""
    if not _is_classification(loss):
        return 0
    targets = data[-1] if isinstance(data, (tuple, list)) and data else None
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
        return 0
    return int((targets == _option(loss, "ignore_index", IGNORED_BY_DEFAULT)).sum())


def shares(weights: Mapping[int, float]) -> dict[int, float]:
    """Return each micro-batch's part of the whole; the weights are added in leaf order."""
    whole = sum(weights[leaf] for leaf in sorted(weights))
    return {leaf: weight / whole for leaf, weight in weights.items() if weight != 0}
