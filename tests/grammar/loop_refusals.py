"""Refusals of a loop with `ls.exact`: what a layout cannot do, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import optim

from grammar.layouts import Layout
from grammar.refusals import OF_SHARDS

__all__ = ["possible_refusals", "refusals"]


OF_FULLY_SHARD = (
    "has a weight of 0, and a sharded model adds the gradients of all micro-batches",
    "the model has parameters of several dtypes",
    "the gradients were changed after backward",  # by a scaler
    "FSDP does not support non-contiguous parameters",
    "does not have a sharding strategy registered",
)
"""Other reasons to refuse a model that the script has sharded, the last two by torch."""


def refusals(drawn: Any, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout of this loop must be refused, if any."""
    return [*_of_layout(drawn, layout), *_of_model(drawn)]


def possible_refusals(drawn: Any, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout may be refused; else it agrees.

    A loss that is maximized, or a sum, may grow until it or the norm of its gradient overflows, in
    the reference as well.
    """
    grows = "maximize=True" in str(drawn.case) or drawn.is_sum
    overflow = ["the norm of the gradient is", "the loss is nan", "the loss is inf"] * grows
    return overflow + [*OF_SHARDS, *OF_FULLY_SHARD] * layout.sharded


def _of_layout(drawn: Any, layout: Layout) -> Iterator[str]:
    if layout.world > drawn.case.microbatches:
        yield "replicas cannot share"
    if drawn.form == "flat" and min(drawn.case.data.sizes) < layout.world:
        yield "pass drop_last=True, or change the batch_size"


def _of_model(drawn: Any) -> Iterator[str]:
    model = str(drawn.case.model)
    if "max_norm" in model:
        yield "with which each lookup writes to the weight"
    if "scale_grad_by_freq" in model:
        yield "which counts rows in each micro-batch"
    if "Teacher" in model:
        yield "was written during forward or backward"
    optimizer = drawn.case.optimization.optimizer
    if optimizer.func is optim.SGD and "fused" in optimizer.keywords and "bfloat16" in model:
        yield "use SGD without fused=True"
