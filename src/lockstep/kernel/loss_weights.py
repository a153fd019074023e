"""Rule 2, loss weights: the share of each micro-batch in the loss of a batch.

The loss of micro-batch m is a mean over its n_m samples. Scaled by n_m / B, the losses of the M
micro-batches add up to the mean over the B samples of the batch, whether or not M divides B:

    B = 5, M = 2     loss = 3/5 * mean(samples 0, 1, 2) + 2/5 * mean(samples 3, 4)

Some losses are not means over samples, because of class weights or ignored targets. Their
share is w_m / (w_0 + w_1 + ...), where a weight function computes w_m from the micro-batch
(`lockstep.model.target_weights` has those of torch's losses). A micro-batch of weight 0 is skipped.
A loss that is a sum needs no share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, SupportsFloat

from lockstep.kernel.splitting import split_evenly

__all__ = ["WeightFunction", "compute_shares", "get_option", "is_number", "is_sum", "share_by_size"]

WeightFunction = Callable[[Any], float]
"""A function of the data of a micro-batch that returns its weight."""


def is_number(value: object) -> bool:
    """Return whether a value is a real number, or has one as its only element.

    Waits for no device.
    """
    if not isinstance(value, SupportsFloat) or math.prod(getattr(value, "shape", ())) != 1:
        return False
    return not getattr(value, "is_complex", bool)()  # a method of tensors


def is_sum(loss: object) -> bool:
    """Return whether a loss sums its samples instead of averaging them, so that it is not scaled.

    Considers the `reduction` of a loss module, or the one bound by `functools.partial`.
    """
    return bool(get_option(loss, "reduction", "mean") == "sum")


def get_option(loss: object, name: str, default: Any) -> Any:
    """Return an option of a loss: an attribute, or what `functools.partial` has bound."""
    bound = loss.keywords if isinstance(loss, partial) else {}
    return bound.get(name, getattr(loss, name, default))


@lru_cache(maxsize=64)
def share_by_size(samples: int, microbatches: int) -> Mapping[int, float]:
    """Return the share of each micro-batch of a batch whose samples count alike."""
    sizes = map(len, split_evenly(samples, microbatches))
    return {microbatch: size / samples for microbatch, size in enumerate(sizes)}


def compute_shares(weights: Mapping[int, float]) -> dict[int, float]:
    """Return the share of each micro-batch from the weights, which are added in their order."""
    whole = sum(weights[microbatch] for microbatch in sorted(weights))
    return {microbatch: weight / whole for microbatch, weight in weights.items() if weight != 0}
