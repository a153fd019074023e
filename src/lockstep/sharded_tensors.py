"""Tensors that torch's `fully_shard` has divided over ranks (`DTensor`), without importing them."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.kernel.errors import LostError

__all__ = [
    "find_shard",
    "gather",
    "gather_tensors",
    "is_sharded",
    "local_part",
    "local_rows",
    "name_storage",
    "read_version",
]


def is_sharded(value: object) -> bool:
    """Return whether a value is a tensor of which each rank has a part."""
    return hasattr(value, "_local_tensor")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def find_shard(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of this rank's part of a sharded tensor, and the number of parts."""
    sharded: Any = tensor
    mesh = sharded.device_mesh  # in its last dimension; another one has the copies of each part
    # Without the mesh's groups, which are gone when the state of an elastic run is handed over.
    return mesh.get_coordinate()[-1], mesh.size(mesh.ndim - 1)


def local_rows(tensor: torch.Tensor) -> slice:
    """Return which rows of a sharded tensor this rank has."""
    rows = tensor.shape[0]
    shard, shards = find_shard(tensor)
    start = min(shard * -(-rows // shards), rows)
    return slice(start, start + local_part(tensor).shape[0])


def name_storage(mesh: Any) -> str:
    """Return the storage of a trainer whose tensors are sharded over a mesh."""
    return "sharded" if mesh.ndim == 1 else "hybrid"


def read_version(tensor: torch.Tensor) -> int:
    """Return a number that changes if a tensor, or this rank's part of it, is written in place."""
    # An operation on a sharded tensor does not count as one on its part.
    return tensor._version + (local_part(tensor)._version if is_sharded(tensor) else 0)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, a collective call; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    try:
        whole: torch.Tensor = sharded.full_tensor()
    except torch.distributed.DistBackendError as error:
        if isinstance(error, LostError) and error.observed == "left":
            needed = "sharded weights are gathered from all ranks: make this call on every rank"
            error.hint = f"; {needed}"
            error.args = (f"{error}{error.hint}",)
        raise
    return whole


def gather_tensors(value: Any) -> Any:
    """Return dicts in which sharded tensors are gathered, one after another."""
    if isinstance(value, dict):
        return {name: gather_tensors(member) for name, member in value.items()}
    return gather(value) if isinstance(value, torch.Tensor) else value
