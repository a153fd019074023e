"""Agreement: all ranks begin with the same model, or say that theirs differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.comm.transfer import all_gather_bytes, broadcast_tensors
from lockstep.errors import DisagreementError

__all__ = ["agree", "require_same"]


def agree(
    module: nn.Module, settings: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank rank 0's parameters and buffers.

    Raises DisagreementError on every rank where the models' names, shapes, strides or
    dtypes differ, or their `settings` (JSON values).
    """
    require_same({"model": _hash(module), **settings}, group)
    broadcast_tensors([*module.parameters(), *module.buffers()], group)


def _hash(model: nn.Module) -> str:
    """Hash what must be the same of a model before its tensors can be exchanged."""
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.requires_grad}"
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def require_same(settings: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise DisagreementError on every rank unless `settings` (JSON values) are equal on all."""
    message = json.dumps(settings).encode()
    everyone = [
        json.loads(each) for each in all_gather_bytes(message, "beginning a training", group)
    ]
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            ours = everyone[0].get(name)
            if value != ours:
                raise DisagreementError(
                    f"rank {rank} has another {name} than rank 0 ({value} and {ours}); give every "
                    "rank the same arguments"
                )
