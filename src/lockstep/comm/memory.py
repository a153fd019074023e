"""Tensors in shared memory: without a copy in or out, or the same one on every rank.

empty    one tensor a rank; the others add straight from it      | rank 0 | rank 1 |
shared   one tensor for all ranks of a group on this host        | ranks 0 and 1   |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm import backend
from lockstep.errors import LayoutError, WorkError

__all__ = ["empty", "is_shared", "shared"]


def empty(*size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized CPU tensor in shared memory, which collectives reduce in place.

    Other ranks on the host write to the tensor while a collective on the backend "lockstep"
    runs. A process forked from this one shares the tensor too. Without the native backend the
    result is an ordinary tensor.

    Args:
        size: The shape, as integers or as one sequence, as for `torch.empty`.
        dtype: The element type, as for `torch.empty`; None selects torch's default dtype.

    Raises:
        TypeError: `size` or `dtype` is something that `torch.empty` does not take.
        RuntimeError: A dimension is negative, or there is not enough memory.
    """
    try:
        # A meta tensor has no memory: torch parses the arguments, exactly as for torch.empty.
        like = torch.empty(*size, dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:
        sentence, _, _ = str(error).partition("\n")  # a C++ backtrace may follow
        raise type(error)(sentence) from None
    if not backend.available():
        return torch.empty(like.shape, dtype=like.dtype)
    tensor: torch.Tensor = backend.load().empty(like.shape, like.dtype)
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
