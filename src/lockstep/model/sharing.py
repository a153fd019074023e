"""Sharing: whether the ranks of a trainer can hold the parameters once, and how it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.comm.dense import is_dense
from lockstep.comm.native import native_backend
from lockstep.data_parallel.gradients import BUCKET_BYTES, Gradients
from lockstep.data_parallel.shards import Shards
from lockstep.errors import LayoutError
from lockstep.model.optimization import Optimization
from lockstep.model.parallel_context import Setting
from lockstep.model.sharded import Sharded, require_elementwise

__all__ = ["share"]

ALIGNMENT = 64
"""Bytes at which every tensor begins in shared memory, as in memory that torch allocates."""


def share(
    named: Sequence[tuple[str, nn.Parameter]],
    modules: Sequence[nn.Module],
    optimization: Optimization,
    setting: Setting,
    elementwise: bool,
) -> Gradients:
    """Let all ranks share the parameters and shard the optimizer.

    A rank that is alone shares with nobody.

    Args:
        named: The parameters with their names, the same on every rank.
        modules: What a step calls: their backward hooks may look at `.grad`.
        optimization: Its optimizer is sharded.
        setting: The layout.
        elementwise: Whether an optimizer that is not torch's may step pieces of parameters.

    Returns:
        The gradients of the parameters, reduced to this rank's shards.

    Raises:
        LayoutError: The ranks have no memory in common, or a parameter lies in memory in a
            way that shared memory does not keep.
        UsageError: The optimizer cannot step pieces.
    """
    require_elementwise(optimization.optimizer, elementwise)
    if setting.replicas == 1:
        return Gradients(named, setting.group, modules=modules)
    for name, parameter in named:
        if native_backend(parameter.device, parameter.dtype, setting.group) is None:
            raise LayoutError(
                f'shared=True needs the backend "lockstep", whose ranks are on one host, and '
                f"floating parameters on the CPU; {name} ({parameter.dtype} on {parameter.device}) "
                f"is not served by it here: train with shared=False"
            )
        _require_plain_layout(name, parameter)
    parameters = [parameter for _, parameter in named]
    numels, dtypes = [each.numel() for each in parameters], [each.dtype for each in parameters]
    shards = Shards(numels, dtypes, setting.replicas, BUCKET_BYTES)
    shards.cover([n for n, each in enumerate(parameters) if each.requires_grad])
    gradients = Gradients(named, setting.group, shards, modules)
    with torch.no_grad():
        optimization.sharded = Sharded(
            optimization.optimizer, parameters, gradients, shards, setting.group
        )
    return gradients


def _require_plain_layout(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose strides or alignment would change in shared memory.

    Kernels choose their path by both, so its results could have other bits there.
    """
    dense = is_dense(parameter)
    if dense and parameter.data_ptr() % ALIGNMENT == 0:
        return
    how = "does not begin on a 64-byte boundary" if dense else "has gaps between its elements"
    raise LayoutError(
        f"{name} {how}, because it is a view of another tensor; in shared memory it would lie "
        f"otherwise, which may change the bits: make it a tensor of its own with "
        f"torch.nn.Parameter({name}.detach().clone()), or train with shared=False"
    )
