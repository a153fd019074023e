"""Sums of sparse gradients over the ranks, along the tree.

    rank 0   rows 1, 5        (1) every rank announces its gradients and numbers of rows
    rank 1   rows 5, 7        (2) every rank gets the rows of all ranks
                              (3) row 5 is added, rows 1 and 7 are copied

Each rank adds all rows itself. The traffic is the longest message times the number of ranks,
which is small if few rows are used, as with large embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.collectives import (
    all_gather_bytes,
    all_gather_single,
)
from lockstep.comm.memory_format import in_layout_of
from lockstep.kernel.buffers import as_bytes
from lockstep.kernel.norm import in_memory_order
from lockstep.kernel.tree import Node, total

__all__ = ["add_sparse", "sparse_weights", "sum_sparse_gradients"]

DENSE = -1
ABSENT = -2
"""Values in place of the number of rows, for a gradient that is dense or absent."""


def sparse_weights(modules: Iterable[nn.Module]) -> set[torch.Tensor]:
    """Return the parameters that get sparse gradients, according to their modules."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {module.weight for module in modules if isinstance(module, kinds) and module.sparse}


def sum_sparse_gradients(
    held: Mapping[Node, Sequence[torch.Tensor | None]],
    indices: Sequence[int],
    leaves: int,
    models: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[int, torch.Tensor | None]:
    """Add gradients over all leaves of a tree whose nodes the ranks hold.

    Args:
        held: The gradients of each of this rank's nodes, by index: coalesced rows, or dense in
            the memory format of the model tensor; None if absent.
        indices: The indices of the gradients to add, the same on every rank.
        leaves: The number of leaves of the tree.
        models: Tensors with the shape, dtype and memory format of each gradient.
        group: The process group; None is the default group.

    Returns:
        The sums by index, with the same bits on all ranks; None if absent from every leaf.
    """
    mine: list[torch.Tensor] = []
    header: list[tuple[int, int, int, int]] = []
    for node, gradients in held.items():
        for n in indices:
            gradient = gradients[n]
            rows = ABSENT
            if gradient is not None:
                rows = gradient._nnz() if gradient.is_sparse else DENSE
                mine.append(gradient)
            header.append((n, *node, rows))
    messages = all_gather_bytes(json.dumps(header).encode(), "adding sparse gradients", group)
    headers = [[tuple(entry) for entry in json.loads(message)] for message in messages]
    present = [[(n, rows) for n, _, _, rows in header if rows != ABSENT] for header in headers]
    gathered = iter(list(chain(*_gather(mine, present, models, group))))
    nodes: dict[int, dict[Node, torch.Tensor | None]] = {n: {} for n in indices}
    for entries in headers:
        for n, lo, hi, rows in entries:
            nodes[n][lo, hi] = next(gathered) if rows != ABSENT else None
    return {n: total(values, leaves, add_sparse) for n, values in nodes.items()}


def add_sparse(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, each of which is coalesced, dense, or None if absent.

    A row has at most two values, so the order in which torch adds them does not affect the bits.
    """
    if left is None or right is None:
        return left if right is None else right
    if left.is_sparse and right.is_sparse:
        return (left + right).coalesce()
    return right + left if left.is_sparse else left + right


def _gather(
    mine: Sequence[torch.Tensor],
    headers: Sequence[Sequence[tuple[int, int]]],
    models: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> list[list[torch.Tensor]]:
    """Return the gradients of every rank, in the order of its header of (number, rows)."""
    device = next(iter(models.values())).device  # of all parameters
    sizes = [[_sizes(models[n], rows) for n, rows in header] for header in headers]
    width = max(sum(map(sum, of_rank)) for of_rank in sizes)
    message = torch.zeros(width, dtype=torch.uint8, device=device)
    parts = [as_bytes(part) for gradient in mine for part in _parts(gradient)]
    if parts:
        whole = torch.cat(parts)
        message[: whole.numel()] = whole
    everything = torch.empty(len(headers) * width, dtype=torch.uint8, device=device)
    if width:
        all_gather_single(everything, message, group=group)
    gathered = []
    for rank, header in enumerate(headers):
        pieces = [size for pair in sizes[rank] for size in pair]
        cut = iter(everything[rank * width :][: sum(pieces)].split(pieces))
        gathered.append([_gradient(models[n], rows, next(cut), next(cut)) for n, rows in header])
    return gathered


def _parts(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a gradient; a dense gradient has no indices."""
    if gradient.is_sparse:
        return gradient.indices(), gradient.values()
    return gradient.new_empty(0, dtype=torch.int64), in_memory_order(gradient)


def _sizes(model: torch.Tensor, rows: int) -> tuple[int, int]:
    """Return the sizes in bytes of the indices and of the values of a number of rows."""
    if rows == DENSE:
        return 0, model.nbytes
    row = model.nbytes // max(model.shape[0], 1)
    return rows * torch.int64.itemsize, rows * row


def _gradient(
    model: torch.Tensor, rows: int, indices: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return a gradient made of bytes, cloned: a view must be aligned to its element size."""
    if rows == DENSE:
        return in_layout_of(values.clone().view(model.dtype), model)
    where = indices.clone().view(torch.int64).view(1, -1)
    what = values.clone().view(model.dtype).view(where.shape[1], *model.shape[1:])
    return torch.sparse_coo_tensor(
        where, what, model.shape, is_coalesced=True, check_invariants=False
    )
