"""Steps on shards of parameters, with the bits of a step on whole parameters.

the whole parameter    vector instructions, 64 elements | 64 elements | the rest one by one
the shards             cut after a multiple of 64: the same instructions for every element
                       cut elsewhere: other instructions, which may round differently
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.native_module import find_compute_norms
from lockstep.data_parallel.sharded_gradients import find_mesh
from lockstep.data_parallel.sharded_norm import compute_sharded_squares, find_spans
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.norm import compute_squares
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.optimizer_checks import is_torchs, require_elementwise

__all__ = ["CUT_ADVICE", "choose_squares", "explain_cut", "require_shardable", "rounds_alike"]

WIDTH = 64
"""Elements, a multiple of the length of vector instructions."""

CUT_ADVICE = (
    ": use one of torch's optimizers without fused=True and float32 parameters, or sizes of which "
    f"each rank gets a multiple of {WIDTH} elements"
)
"""The advice about a cut, after the words of `explain_cut`."""

EXACT = (torch.float32, torch.float64)
"""The dtypes in which torch's optimizers round alike with and without vector instructions.

Not if they are fused, and not in bfloat16, which vector instructions round less often.
"""


def choose_squares(parallel: ParallelContext, module: nn.Module) -> Callable[..., list[float]]:
    """Return the function of the squares in the norm of gradients, which may be sharded."""
    if not parallel.is_sharded:
        return partial(compute_squares, measure=find_compute_norms())
    if parallel.rank not in parallel.hosts[0]:  # another copy of the gradients is counted
        return lambda *_: []
    group = find_mesh(module).shards
    return lambda gradients, *_: compute_sharded_squares(gradients, group)


def rounds_alike(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether a step rounds each element alike, at any cut of its parameter."""
    return is_torchs(optimizer) and not group.get("fused") and dtype in EXACT


def require_shardable(optimizer: Optimizer, names: Mapping[torch.Tensor, str], ranks: int) -> None:
    """Raise LayoutError if an optimizer's step on shards may give other bits than a whole step.

    Args:
        optimizer: The optimizer, before its first step.
        names: The names of the model's parameters.
        ranks: The number of ranks that share the parameters.
    """
    require_elementwise(optimizer)
    kind = type(optimizer)
    for group in optimizer.param_groups:
        is_fused = bool(group.get("fused"))
        has_fused = kind in (torch.optim.Adam, torch.optim.AdamW)
        if (is_fused and not has_fused) or kind is torch.optim.Rprop:
            raise LayoutError(
                f"torch cannot step the shards of parameters by {kind.__name__}"
                f"{' with fused=True' if is_fused else ''}",
                f": {'leave fused out' if is_fused else 'use another optimizer'}",
            )
        for parameter in group["params"]:
            reason = explain_cut(optimizer, group, parameter, ranks)
            if reason:
                raise LayoutError(f"{names.get(parameter, 'a parameter')} {reason}", CUT_ADVICE)


def explain_cut(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, ranks: int
) -> str:
    """Return why a step on the shards of a parameter may round differently, or "".

    A frozen parameter is not stepped: ask again when it is trained.

    Args:
        optimizer: The optimizer.
        group: The parameter's group in it.
        parameter: The parameter.
        ranks: The number of ranks that share the parameter.
    """
    if not parameter.requires_grad or rounds_alike(optimizer, group, parameter.dtype):
        return ""
    cuts = [start for start, _ in find_spans(parameter.shape, ranks)[1:]]
    if not any(cut % WIDTH and cut < parameter.numel() for cut in cuts):
        return ""
    kind = type(optimizer).__name__
    return (
        f"{tuple(parameter.shape)} is cut after {cuts[0]} elements on {ranks} ranks, no multiple "
        f"of {WIDTH}, and {kind} may round the last elements differently"
    )
