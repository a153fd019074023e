"""Agreement: ranks that would train different things say so before they begin."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.comm.transfer import all_gather_bytes
from lockstep.errors import DisagreementError

__all__ = ["describe", "require_same"]


def describe(model: nn.Module) -> str:
    """Return a hash of the names, shapes, dtypes and devices' kinds of parameters and buffers."""
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def require_same(settings: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise DisagreementError on every rank unless `settings` (JSON values) are equal on all."""
    message = json.dumps(settings).encode()
    everyone = [json.loads(each) for each in all_gather_bytes(message, group)]
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            ours = everyone[0].get(name)
            if value != ours:
                raise DisagreementError(
                    f"rank {rank} has another {name} than rank 0 ({value} and {ours}); build the "
                    "trainer from the same arguments on every rank"
                )
