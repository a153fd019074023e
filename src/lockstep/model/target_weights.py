"""Weights of losses that are means over targets: with class weights, or with ignored targets.

Rule 2 (`lockstep.kernel.loss_weights`) needs what the mean of a micro-batch divides by. Here it is
found from the options of torch's classification losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from lockstep.kernel.errors import UsageError
from lockstep.kernel.loss_weights import WeightFunction, get_option

__all__ = [
    "find_ignored_count",
    "infer_weight_function",
    "is_classification",
    "loss_name",
    "target_weight",
]

IGNORED_BY_DEFAULT = -100
"""The default `ignore_index` of torch's losses."""
LABELS = "labels"
"""The key of the targets in a batch that is a mapping, as Hugging Face models name them."""


def loss_name(loss: object) -> str:
    """Return the name of a loss function or module, for messages."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def is_classification(loss: object) -> TypeGuard[Callable[..., Any]]:
    """Return whether a loss is one of torch's that are means over class indices."""
    function = loss.func if isinstance(loss, partial) else loss
    known = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    )
    return known and get_option(loss, "reduction", "mean") == "mean"


def target_weight(loss: Callable[..., Any], *, shift: int = 0) -> WeightFunction:
    """Return a function for `Trainer(loss_weight=...)` that counts the targets of a micro-batch.

    Targets that are `ignore_index` are not counted, and each target counts with its class weight,
    as in the mean of the loss. A micro-batch is a tuple or list whose last entry holds class
    indices, or a mapping that has them as "labels".

    Args:
        loss: A `CrossEntropyLoss` or `NLLLoss`, a
            `partial(torch.nn.functional.cross_entropy, ...)`, or a module that contains one such
            loss.
        shift: The number of targets at the beginning of each sequence that the model does not
            predict: 1 for causal language models of Hugging Face, which shift their labels.

    Raises:
        UsageError: `loss` is none of these.
    """
    inner = _inner_losses(loss)
    if not is_classification(loss) and len(inner) != 1:
        raise UsageError(
            "ls.target_weight takes a CrossEntropyLoss, an NLLLoss or a module with one of them, "
            f"not {loss_name(loss)}: pass the one that it uses, or a function of your own "
            "that counts the targets of a micro-batch, such as loss_weight=lambda data: "
            "float((data[-1] != padding).sum())"
        )
    loss = inner[0] if inner else loss
    class_weights = get_option(loss, "weight", None)
    ignored = get_option(loss, "ignore_index", IGNORED_BY_DEFAULT)

    def weight(data: Any) -> float:
        targets = _find_targets(data)
        if targets is None:
            raise UsageError(
                f"ls.target_weight found no targets in a {type(data).__name__}: they are the last "
                'entry of a tuple or list, or "labels" of a mapping; for anything else pass '
                "loss_weight= a function that counts the targets of a micro-batch"
            )
        if shift and targets.dim() < 2:
            raise UsageError(
                f"ls.target_weight(shift={shift}) got targets of shape {tuple(targets.shape)}: "
                "they have no second dimension, of positions in a sequence, to shift"
            )
        targets = targets[:, shift:] if shift else targets
        if targets.is_floating_point():  # a distribution over classes: a mean over the samples
            return float(len(targets))
        kept = targets[targets != ignored]
        if class_weights is None:
            return float(kept.numel())
        return float(class_weights.to(torch.float64)[kept].sum())

    return weight


def infer_weight_function(loss: object) -> WeightFunction | None:
    """Return the weight function that the options of a loss require; None if they require none.

    With class weights or a custom `ignore_index` the loss is not a mean over samples.
    """
    if not is_classification(loss):
        return None
    ignored = get_option(loss, "ignore_index", IGNORED_BY_DEFAULT)
    if get_option(loss, "weight", None) is None and ignored == IGNORED_BY_DEFAULT:
        return None
    return target_weight(loss)


def _inner_losses(loss: object) -> list[Any]:
    """Return the losses inside a loss module that are means over their targets."""
    parts = loss.modules() if isinstance(loss, nn.Module) else ()
    return [part for part in parts if is_classification(part)]


def find_ignored_count(loss: object) -> Callable[[Any], int] | None:
    """Return a function that counts the targets that a loss without a weight function ignores.

    A model that returns its own loss (None) ignores "labels" of -100 in a mapping.

    Returns:
        A function of the data of a micro-batch; None if the loss ignores no targets.
    """
    if loss is not None and not is_classification(loss):
        return None
    ignored = get_option(loss, "ignore_index", IGNORED_BY_DEFAULT)

    def count(data: Any) -> int:
        targets = _find_targets(data) if loss is not None or isinstance(data, Mapping) else None
        if targets is None or targets.is_floating_point():
            return 0
        if ignored < 0 and targets.numel() and targets.min().item() >= 0:
            return 0  # the usual case, found in half the time
        return int((targets == ignored).sum())

    return count


def _find_targets(data: Any) -> torch.Tensor | None:
    """Return the targets of a micro-batch; None if they are not known."""
    if isinstance(data, Mapping):
        targets = data.get(LABELS)
    else:
        targets = data[-1] if isinstance(data, (tuple, list)) and data else None
    return targets if isinstance(targets, torch.Tensor) else None
