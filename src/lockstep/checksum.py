"""Checksums of tensors: 64-bit XXH3 over their bytes, at the speed of memory.

They tell whether two tensors hold the same bits, and where the same bits lie: the
hash depends on the position of every byte. They do not protect from an attacker;
digests that people compare use SHA-256 (`digest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

__all__ = ["checksum", "digest", "name_optimizer_tensors"]


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of a tensor's dtype, shape and elements in row-major order.

    Args:
        tensor: Of any dtype, strided or sparse, on any device; a copy is made on the
            CPU only where the elements are not contiguous there already.

    Returns:
        A number from 0 to 2**64 - 1; of a tensor on the meta device the hash of dtype and
        shape alone.
    """
    hasher = xxhash.xxh3_64(f"{tensor.dtype}|{tuple(tensor.shape)}".encode())
    for part in _strided_parts(tensor.detach()):
        if not part.is_meta and part.numel():
            part = part.cpu().resolve_conj().resolve_neg().contiguous()
            hasher.update(memoryview(part.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return hasher.intdigest()


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


# --- digests of states ---------------------------------------------------------------------------


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of a state dict, in sorted order.

    Tensors of any device, layout and dtype; numbers count as tensors of no
    dimension (float64 or int64). What is neither (extra state) is left out.
    """
    sha = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        if not isinstance(value, torch.Tensor):
            continue
        value = value.detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def name_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, Any]:
    """Name the optimizer's state after its parameters: "conv.weight/exp_avg" and so on."""
    return {
        f"{names[parameter]}/{entry}": value
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    }
