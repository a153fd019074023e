"""The digest: one line that says whether two runs ended with the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["digest", "name_optimizer_tensors"]


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
