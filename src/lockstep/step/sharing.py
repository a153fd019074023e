"""Sharing: whether the ranks of a trainer can hold the parameters once, and how it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.comm.native import native_backend
from lockstep.errors import LayoutError
from lockstep.step.gradients import BUCKET_BYTES, Gradients
from lockstep.step.optimization import Optimization
from lockstep.step.setting import Setting
from lockstep.step.sharded import Sharded, require_elementwise
from lockstep.step.shards import Shards

__all__ = ["share"]


def share(
    named: Sequence[tuple[str, nn.Parameter]],
    optimization: Optimization,
    setting: Setting,
    elementwise: bool,
) -> Gradients:
    """Let all ranks share the parameters and shard the optimizer; return the gradients for it.

    A rank that is alone shares with nobody. Raises LayoutError where the ranks have
    no memory in common, UsageError for an optimizer that cannot step pieces.
    """
    require_elementwise(optimization.optimizer, elementwise)
    if setting.replicas == 1:
        return Gradients(named, setting.group)
    for name, parameter in named:
        if native_backend(parameter.device, parameter.dtype, setting.group) is None:
            raise LayoutError(
                f'shared=True needs the backend "lockstep", whose ranks are on one host, and '
                f"floating parameters on the CPU; {name} ({parameter.dtype} on {parameter.device}) "
                f"is not served by it here: train with shared=False"
            )
    parameters = [parameter for _, parameter in named]
    numels, dtypes = [each.numel() for each in parameters], [each.dtype for each in parameters]
    shards = Shards(numels, dtypes, setting.replicas, BUCKET_BYTES)
    shards.cover([n for n, each in enumerate(parameters) if each.requires_grad])
    gradients = Gradients(named, setting.group, shards)
    with torch.no_grad():
        optimization.sharded = Sharded(
            optimization.optimizer, parameters, gradients, shards, setting.group
        )
    return gradients
