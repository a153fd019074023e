"""Digests of states in plain PyTorch, to compare with those of Lockstep."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, in sorted order."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, bool | int | float):
            value = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        rows = value.coalesce() if value.is_sparse else None
        for part in [value] if rows is None else [rows.indices(), rows.values()]:
            sha.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state by the names of its parameters."""
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    return {
        f"{names[parameter]}/{entry}": value
        for parameter, state in optimizer.state.items()
        for entry, value in state.items()
    }
