"""Shared storage: whether and how ranks share parameters and an optimizer's state.

The optimizer must update each element independently, since it then computes the same bits on pieces
as on whole tensors. All ranks must be on one host, and the parameters must keep their layout in
shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.backend import host_group_of
from lockstep.comm.native_all_reduce import native_backend
from lockstep.comm.sparse_gradients import sparse_weights
from lockstep.data_parallel.gradient_reducer import GradientReducer
from lockstep.data_parallel.planned_buckets import BUCKET_BYTES
from lockstep.data_parallel.shared_pieces import SharedPieces
from lockstep.kernel.errors import LayoutError
from lockstep.kernel.norm import is_dense
from lockstep.malloc import release_freed_memory
from lockstep.model.parallel_context import ParallelContext
from lockstep.training.optimizer_checks import require_elementwise
from lockstep.training.storage.shared_optimizer import SharedOptimizer

__all__ = ["share_parameters"]

ALIGNMENT = 64
"""The alignment in bytes of tensors in shared memory, as in memory that torch allocates."""


def share_parameters(
    named: Sequence[tuple[str, nn.Parameter]],
    modules: Sequence[nn.Module],
    optimizer: Optimizer,
    parallel: ParallelContext,
) -> tuple[GradientReducer, SharedOptimizer | None]:
    """Move the parameters to memory that all ranks share, and divide the optimizer.

    With one rank, nothing is shared.

    Args:
        named: The parameters with their names, the same on every rank.
        modules: The modules that a step calls, whose backward hooks may read `.grad`.
        optimizer: The optimizer of these parameters.
        parallel: The layout.

    Returns:
        The reducer of the gradients to this rank's pieces, and the shared optimizer; with one
        rank, a reducer to whole gradients, and None.

    Raises:
        LayoutError: The ranks cannot share memory, or a parameter's strides or alignment would
            change in shared memory.
        UsageError: The optimizer cannot step pieces, or a parameter has sparse gradients.
    """
    require_elementwise(optimizer)
    sparse = sparse_weights(module for called in modules for module in called.modules())
    for name, parameter in named:
        if parameter in sparse:
            raise LayoutError(
                f'storage="shared" cannot train {name}, whose gradient is sparse: make its '
                'Embedding with sparse=False, or train with storage="replicated"'
            )
    if parallel.replicas == 1:
        return GradientReducer(named, parallel.group, modules=modules), None
    if host_group_of(parallel.group) is not None:
        raise LayoutError(
            'storage="shared" keeps one copy of the parameters in the memory of one host, and '
            'these ranks are on several hosts: train with storage="replicated"'
        )
    for name, parameter in named:
        # Frozen parameters are not stepped, so they may have any dtype.
        dtype = parameter.dtype if parameter.requires_grad else torch.float32
        if native_backend(parameter.device, dtype, parallel.group) is None:
            raise LayoutError(
                f'storage="shared" needs the backend "lockstep", whose ranks are on one host, and '
                f"on the CPU parameters that are floating or frozen; {name} ({parameter.dtype} on "
                f'{parameter.device}) is not served by it here: train with storage="replicated"'
            )
        _require_plain_layout(name, parameter)
    parameters = [parameter for _, parameter in named]
    numels = [parameter.numel() for parameter in parameters]
    dtypes = [parameter.dtype for parameter in parameters]
    pieces = SharedPieces(numels, dtypes, parallel.replicas, BUCKET_BYTES, BUCKET_BYTES // 16)
    pieces.cover([n for n, parameter in enumerate(parameters) if parameter.requires_grad])
    gradients = GradientReducer(named, parallel.group, pieces, modules)
    with torch.no_grad():
        shared = SharedOptimizer(optimizer, parameters, gradients, pieces, parallel.group)
    release_freed_memory()  # of the whole parameters, which steps would not fill
    return gradients, shared


def _require_plain_layout(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter whose strides or alignment would change in shared memory.

    Kernels choose their code path by both, so results could have other bits.
    """
    dense = is_dense(parameter)
    if dense and parameter.data_ptr() % ALIGNMENT == 0:
        return
    how = "does not begin on a 64-byte boundary" if dense else "has gaps between its elements"
    raise LayoutError(
        f"{name} {how}, because it is a view of another tensor; in shared memory its layout would "
        "differ, which may change the bits: make it a separate tensor with "
        f'torch.nn.Parameter({name}.detach().clone()), or train with storage="replicated"'
    )
