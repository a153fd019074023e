"""Refusals: what a layout cannot do, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import optim

from grammar import Case
from grammar.drawing import described
from grammar.layouts import Layout

OF_SHARDS = (
    "cannot train a sharded model with",
    "of a sharded model cannot share evenly",
    "cannot divide the parameter",
    "cannot divide parameters of several dtypes",
    "gets sparse gradients",
    "treat each element of a parameter by itself",
    "is cut after",
    "torch cannot step the shards of parameters by",
    "is a view and is being modified inplace",
    "has a hook, which a sharded model does not call",
    "was called several times in a micro-batch",
    "cannot be evaluated by",
    "which a sharded model forgets",
    "fully_shard changes the sum of the gradients of an input of",
    "the hook average_over_parameters of",
    "are different tensors over the same memory",
)
"""What a sharded model may be refused for; the width and the cuts decide about most of it."""


def refusals(case: Case, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout of this case must be refused, if any."""
    return [*_of_layout(case, layout), *_of_model(case, layout), *_of_sharing(case, layout)]


def possible_refusals(case: Case, layout: Layout) -> list[str]:
    """Return parts of the sentences with which a layout may be refused; else it agrees.

    Whether a block writes into its inputs, or into memory that another tensor shares, depends on
    where the model is cut. A loss that is maximized, or a sum, may grow until the norm of its
    gradient overflows, in the reference as well.
    """
    grows = "maximize=True" in str(case) or "reduction='sum'" in str(case)
    overflow = ["the norm of the gradient is"] if grows else []
    if layout.sharded:
        # torch reduces the gradients of other blocks first where a block gets none.
        order = ["make the same calls on every rank"] * ("Sometimes" in str(case.model))
        return [*overflow, *order, *OF_SHARDS]
    has_alias = "'view')" in str(case.model) or "'detached')" in str(case.model)
    if has_alias and (layout.stages > 1 or layout.recompute):
        return [
            *overflow,
            "writes in place into an input that shares its memory with another one",
            "writes into an input that shares its memory with another one",
            "a tensor that backward needs was overwritten in place",
        ]
    if layout.recompute and "inplace=True" in str(case.model):
        return [*overflow, "a tensor that backward needs was overwritten in place"]
    return overflow


def _of_layout(case: Case, layout: Layout) -> Iterator[str]:
    if layout.world % layout.stages:
        yield "cannot hold replicas of"
    if layout.replicas > case.microbatches:
        yield "so some would have none"
    if layout.recompute and not case.model.is_chain:
        yield "does not name its blocks"
    if layout.stages > 1:
        if layout.shared:
            yield 'storage="shared" needs the whole model'
        if not case.model.is_chain:
            yield "does not define how to split it into"
        if layout.loop:
            yield "a manual step needs the whole model"


def _of_model(case: Case, layout: Layout) -> Iterator[str]:
    model = str(case.model)
    if "max_norm" in model:
        yield "with which each lookup writes to the weight"
    if "scale_grad_by_freq" in model:
        yield "which counts rows in each micro-batch"
    if "Teacher" in model:
        yield "was written during forward or backward"
    if "tied_by_memory" in model and (layout.stages > 1 or layout.shared):
        yield "are different tensors over the same memory"
    if layout.stages > 1 and "PythonNoise" in described(case.model.blocks):
        yield "a block draws from Python's or numpy's random numbers"
    if case.optimization.is_hooked and (layout.stages > 1 or layout.shared):
        yield "the hook average_over_parameters of"
    optimizer = case.optimization.optimizer
    if optimizer.func is optim.SGD and "fused" in optimizer.keywords and "bfloat16" in model:
        yield "use SGD without fused=True"


def _of_sharing(case: Case, layout: Layout) -> Iterator[str]:
    if not layout.shared:
        return
    if case.optimization.first is not None:
        yield 'storage="shared" steps one optimizer'
    if not case.optimization.is_elementwise:
        yield "treat each element of a parameter by itself"
    if "sparse=True" in str(case.model):
        yield "whose gradient is sparse"
    if layout.replicas > 1:
        if "ToComplex" in str(case.model):
            yield 'storage="shared" needs the backend "lockstep"'
        # Converted to another dtype, a parameter has memory of its own.
        if "Gapped" in str(case.model) and case.model.dtype is torch.float32:
            yield "because it is a view of another tensor"
