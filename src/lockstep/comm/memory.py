"""Tensors in shared memory: where the backend "lockstep" needs no copy in or out."""

from __future__ import annotations

import torch

from lockstep.comm import backend

__all__ = ["empty", "is_shared"]


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
