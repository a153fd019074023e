"""Checksums of tensors: 64-bit XXH3 over their bytes, at the speed of memory.

They tell whether two tensors hold the same bits, and where the same bits lie: the
hash depends on the position of every byte. They do not protect from an attacker;
digests that people compare use SHA-256 (`lockstep.model.digest`).
"""

from __future__ import annotations

import torch
import xxhash

__all__ = ["checksum"]


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
