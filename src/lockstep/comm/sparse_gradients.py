"""Average sparse gradients over the ranks along the tree.

    rank 0   rows 1, 5        (1) every rank announces its gradients and numbers of rows
    rank 1   rows 5, 7        (2) every rank gets the rows of all ranks
                              (3) row 5 is added, rows 1 and 7 are copied, all are divided

Each rank adds all rows itself. The traffic is the longest message times the number of ranks,
which is small while few rows are used, as with large embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence

import torch
import torch.distributed as dist

from lockstep.comm.collectives import (
    all_gather_bytes,
    all_gather_single,
    as_bytes,
)
from lockstep.comm.tree import total

__all__ = ["average_sparse_gradients"]

Rows = torch.Tensor | None
"""A coalesced tensor, sparse in its first dimension, or None."""


def average_sparse_gradients(
    gradients: Mapping[int, torch.Tensor | None],
    new: Container[int],
    models: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> dict[int, torch.Tensor]:
    """Average every gradient that is new on some rank.

    Args:
        gradients: The gradients by number, with the same numbers on every rank. None if there is
            none; of a dense gradient, the rows that are not zero are used.
        new: The numbers of new gradients. Others are used only if another rank has a new one.
        models: Tensors with the shape and dtype of each gradient.
        group: The process group; None is the default group.

    Returns:
        The coalesced means by number, with the same bits on all ranks.
    """
    mine = {n: _rows(gradient) for n, gradient in gradients.items() if gradient is not None}
    header = json.dumps([(n, n in new, rows._nnz()) for n, rows in mine.items()]).encode()
    messages = all_gather_bytes(header, "averaging sparse gradients", group)
    headers = [json.loads(each) for each in messages]
    wanted = sorted({n for each in headers for n, is_new, _ in each if is_new})
    if not wanted:
        return {}
    everyone = _gather([mine[n] for n in mine], headers, models, group)
    means = {}
    for n in wanted:
        leaves: dict[tuple[int, int], Rows] = {
            (rank, rank + 1): found.get(n) for rank, found in enumerate(everyone)
        }
        rows = total(leaves, len(everyone), _add)
        assert rows is not None
        means[n] = (rows / len(everyone)).coalesce()
    return means


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as coalesced rows."""
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return gradient.detach().coalesce()
    return gradient.detach().to_dense().to_sparse(1).coalesce()


def _add(left: Rows, right: Rows) -> Rows:
    """Add row by row; a row has at most two values, so their order does not affect the bits."""
    if left is None or right is None:
        return left if right is None else right
    return (left + right).coalesce()


def _gather(
    mine: Sequence[torch.Tensor],
    headers: Sequence[Sequence[tuple[int, bool, int]]],
    models: Mapping[int, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> list[dict[int, torch.Tensor]]:
    """Return the rows of every rank, by the numbers in its header."""
    device = next(iter(models.values())).device
    sizes = [[_sizes(models[n], rows) for n, _, rows in each] for each in headers]
    width = max(sum(map(sum, each)) for each in sizes)
    message = torch.zeros(width, dtype=torch.uint8, device=device)
    parts = [as_bytes(part) for rows in mine for part in (rows.indices(), rows.values())]
    if parts:
        whole = torch.cat(parts)
        message[: whole.numel()] = whole
    everything = torch.empty(len(headers) * width, dtype=torch.uint8, device=device)
    if width:
        all_gather_single(everything, message, group=group)
    found = []
    for rank, header in enumerate(headers):
        pieces = [size for pair in sizes[rank] for size in pair]
        cut = iter(everything[rank * width :][: sum(pieces)].split(pieces))
        found.append({n: _sparse(models[n], next(cut), next(cut)) for n, _, _ in header})
    return found


def _sizes(model: torch.Tensor, rows: int) -> tuple[int, int]:
    """Return the sizes in bytes of the indices and of the values of that many rows."""
    row = model.nbytes // max(model.shape[0], 1)
    return rows * torch.int64.itemsize, rows * row


def _sparse(model: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Create a sparse tensor from bytes, cloned: a view must be aligned to its element size."""
    where = indices.clone().view(torch.int64).view(1, -1)
    what = values.clone().view(model.dtype).view(where.shape[1], *model.shape[1:])
    return torch.sparse_coo_tensor(
        where, what, model.shape, is_coalesced=True, check_invariants=False
    )
