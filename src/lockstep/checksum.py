"""Checksums of tensors: 64-bit XXH3 over their bytes, at the speed of memory.

They show whether two tensors hold the same bits at the same positions. They do not
protect against an attacker; digests that people compare use SHA-256 (`digest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep.compiled_wrapper import unwrap
from lockstep.kernel.errors import UsageError
from lockstep.sharded_tensors import gather, local_part

__all__ = ["checksum", "digest", "name_optimizer_tensors"]

PIECE_BYTES = 8 << 20


def checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit hash of a tensor's dtype, shape and elements in row-major order.

    Args:
        tensor: A strided, sparse or nested tensor of any dtype, on any device, or an instance of
            a subclass that wraps other tensors. Elements that are not in contiguous memory of
            the CPU are copied there, 8 MiB at a time. Of a sharded tensor, this rank's part is
            hashed.

    Returns:
        An integer from 0 to 2**64 - 1; for a tensor on the meta device, the hash of its dtype
        and shape alone.
    """
    tensor = local_part(tensor.detach())
    if (parts := _wrapped_parts(tensor)) is not None:
        numbers = [checksum(part) for part in parts]
        return xxhash.xxh3_64_intdigest(f"{tensor.dtype}|{numbers}".encode())
    hasher = xxhash.xxh3_64(f"{tensor.dtype}|{tuple(tensor.shape)}".encode())
    for part in _strided_parts(tensor):
        if not part.is_meta and part.numel():
            for piece in _pieces(part):
                hasher.update(_bytes_of(piece.cpu().resolve_conj().resolve_neg()))
    return hasher.intdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements in row-major order; no copy if it is contiguous."""
    # Torch calls a single element with any stride contiguous, and then cannot view its bytes.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    # Not `numpy()`, after which memory cannot be resized, as torch does with that of shards.
    return memoryview(np.from_dlpack(flat.view(torch.uint8)))  # type: ignore[arg-type]


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, in pieces that need little memory if they must be copied."""
    size = tensor.numel() * tensor.element_size()
    if size <= PIECE_BYTES or (tensor.is_contiguous() and tensor.device.type == "cpu"):
        yield tensor
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0])
    else:
        for piece in tensor.split(max(1, tensor.shape[0] * PIECE_BYTES // size)):
            yield from _pieces(piece)


def _wrapped_parts(tensor: Any) -> Sequence[torch.Tensor] | None:
    """Return the tensors that a nested tensor or a subclass wraps; None for other tensors."""
    if tensor.is_nested and tensor.layout is torch.jagged:
        lengths = tensor.lengths()
        return [tensor.values(), tensor.offsets(), *([] if lengths is None else [lengths])]
    if tensor.is_nested:
        return list(tensor.unbind())
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


# --- digests of states ---------------------------------------------------------------------------


def digest(state: Mapping[str, Any] | torch.nn.Module) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of a state dict, in sorted order.

    Args:
        state: A state dict, or a module, whose state dict is used. Tensors may be on any device
            and have any layout and dtype. Numbers count as zero-dimensional tensors (float64 or
            int64). Other entries (extra state) are left out. Sharded tensors (`DTensor`) are
            gathered one after another: call this on every rank.

    Returns:
        64 hexadecimal digits.

    Raises:
        UsageError: `state` is something else, or has a tensor on the meta device.
    """
    sha = hashlib.sha256()
    tensors = _named_tensors(state)
    for name in sorted(tensors):
        value = gather(tensors[name].detach())
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        for part in [value] if value.layout is torch.strided else _strided_parts(value):
            sha.update(_bytes_of(part.cpu()))
    return sha.hexdigest()


def _named_tensors(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors and numbers of a state dict or module, by name."""
    if isinstance(state, torch.nn.Module):
        state = unwrap(state).state_dict()  # without torch.compile's prefix
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        own = ": call its method digest()" if hasattr(state, "digest") else ""
        raise UsageError(
            f"ls.digest takes a module or its state dict, not an object of type {kind}{own}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                raise UsageError(f"{name} has no values on this rank: call digest() on every rank")
            tensors[name] = value
        elif isinstance(value, (bool, int, float)):
            dtype = torch.float64 if isinstance(value, float) else None
            tensors[name] = torch.tensor(value, dtype=dtype)
    nested = next((name for name, value in state.items() if isinstance(value, Mapping)), None)
    if nested is not None and not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(
            f"ls.digest takes the state dict of a module, and {nested!r} is a state dict itself: "
            f"pass state[{nested!r}], or call digest() or optimizer_digest() of the training"
        )
    return tensors


def name_optimizer_tensors(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of an optimizer's state by name, such as "conv.weight/exp_avg".

    The members of a list are named "conv.weight/factors[0]".

    Args:
        states: The state of each parameter, by the parameter's name.
    """
    return {
        name: member
        for parameter, state in states.items()
        for entry, value in state.items()
        for name, member in _members(f"{parameter}/{entry}", value)
    }


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or the members of a container, with their names."""
    if isinstance(value, (list, tuple, Mapping)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, member in pairs:
            yield from _members(f"{name}[{key!r}]", member)
    else:
        yield name, value
