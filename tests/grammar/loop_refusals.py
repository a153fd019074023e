"""Refusals of a loop with `ls.exact`: what a layout cannot do, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grammar.layouts import Layout
from grammar.refusals import OF_SHARDS

__all__ = ["possible_refusals", "refusals"]


def refusals(drawn: Any, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout of this loop must be refused, if any."""
    return [*_of_layout(drawn, layout), *_of_model(drawn)]


def possible_refusals(drawn: Any, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout may be refused; else it agrees."""
    if layout.sharded:
        return [*OF_SHARDS]
    return []


def _of_layout(drawn: Any, layout: Layout) -> Iterator[str]:
    if layout.world > drawn.case.microbatches:
        yield "so some would have none"
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
