"""Tensors in shared memory: without a copy in or out, or the same one on every rank.

empty    one tensor a rank; the others add straight from it      | rank 0 | rank 1 |
shared   one tensor for all ranks of a group on this host        | ranks 0 and 1   |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.errors import LayoutError, WorkError

__all__ = ["empty", "is_shared", "shared"]


def empty(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialised CPU tensor that collectives on "lockstep" reduce in place.

    `size` as for `torch.empty`; `dtype` None is torch's default. The memory is
    shared with the other ranks of this host: they may write to it during a
    collective, and so may a forked child at any time. Without the native backend
    it is an ordinary tensor. RuntimeError where there is not enough memory.
    """
    shape = list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else list(size)
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not backend.available():
        return torch.empty(shape, dtype=chosen)
    tensor: torch.Tensor = backend.load().empty(shape, chosen)
    return tensor


def is_shared(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor lies in memory that `empty` gave, or DDP or FSDP2 through it."""
    return backend.available() and bool(backend.load().is_shared(tensor))


def shared(
    shape: int | Sequence[int], dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return a CPU tensor of zeros that is the same memory on every rank of `group`.

    A collective call: every rank makes it, with the same size. What one rank
    writes the others read; when, is theirs to order (a barrier, or
    `lockstep.comm.word`). Starts on a page. The memory goes back to the system
    when no rank holds a view of it any more, also where ranks were killed. A rank
    that is alone gets ordinary memory.

    Raises on every rank: WorkError where there is not enough memory, LayoutError
    where the group's backend is not "lockstep", which alone proves that its ranks
    are on one host. `dtype` is any that has a size; `group` None is the world.
    """
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return torch.zeros(sizes, dtype=dtype)
    native = backend.of_group(group)
    if native is None:
        raise LayoutError(
            f"ranks can share one tensor only on the backend 'lockstep', which serves ranks of one "
            f"host; this group has the backend '{dist.get_backend(group)}'"
        )
    try:
        # A call of all ranks, also with more bytes than fit into a number of the backend's.
        flat: torch.Tensor = native.share(min(math.prod(sizes) * dtype.itemsize, 1 << 62))
    except RuntimeError as error:
        raise WorkError(str(error)) from None
    return flat.view(dtype).view(sizes)
