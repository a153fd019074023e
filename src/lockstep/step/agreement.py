"""Agreement: all ranks begin with the same model, or say that theirs differ.

rank           0      1      2      3          2 replicas of 2 stages
block 0      alive    -    alive    -          rank 0 gives it to rank 2
block 1        -    alive    -    alive        rank 1 gives it to rank 3
                     (-: on the meta device, known by names and shapes only)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.transfer import all_gather_bytes, broadcast_tensors, give_tensors
from lockstep.errors import DisagreementError, UsageError
from lockstep.step.presence import materialize, tensors_of

__all__ = ["agree", "require_same"]

WITHOUT, WANTED, HELD = 0, 1, 2
"""What a rank says of a tensor: it needs none, it needs it and lacks it, it has it."""

TOPIC = "beginning a training"


def agree(
    module: nn.Module,
    settings: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    device: str | torch.device = "cpu",
    needed: Callable[[str], bool] = lambda name: True,
) -> None:
    """Give every rank the parameters and buffers of the first rank that has them.

    What is on the meta device here gets memory on `device` where it is `needed`.
    Raises DisagreementError on every rank where the models' names, shapes, strides or
    dtypes differ, or their `settings` (JSON values); UsageError where no rank has what
    some rank needs.
    """
    require_same({"model": _hash(module), **settings}, group)
    marks = [
        (WANTED if needed(name) else WITHOUT) if tensor.is_meta else HELD
        for name, tensor in tensors_of(module).items()
    ]
    everyone = all_gather_bytes(bytes(marks), TOPIC, group)
    plan = _plan(list(tensors_of(module)), everyone)
    materialize(module, device, needed)
    tensors = list(tensors_of(module).values())
    for (source, takers), numbers in plan.items():
        given = [tensors[number] for number in numbers]
        if len(takers) == len(everyone):
            broadcast_tensors(given, group, source)
        else:
            give_tensors(given, group, source, takers)


def _plan(
    names: Sequence[str], everyone: Sequence[bytes]
) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return the numbers of the tensors by the rank that gives them and those that have them."""
    plan: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, name in enumerate(names):
        said = [marks[number] for marks in everyone]
        takers = tuple(rank for rank, mark in enumerate(said) if mark != WITHOUT)
        if takers and HELD not in said:
            raise UsageError(
                f"{name} is on the meta device on every rank, so that nobody has its weights: load "
                "them on one rank, or give the model's blocks as a list of callables, which come "
                "to life where they are needed"
            )
        if takers:
            plan.setdefault((said.index(HELD), takers), []).append(number)
    return plan


def _hash(model: nn.Module) -> str:
    """Hash what must be the same of a model before its tensors can be exchanged."""
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.requires_grad}"
        for name, tensor in tensors_of(model).items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def require_same(settings: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise DisagreementError on every rank unless `settings` (JSON values) are equal on all."""
    message = json.dumps(settings).encode()
    everyone = [json.loads(each) for each in all_gather_bytes(message, TOPIC, group)]
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            ours = everyone[0].get(name)
            if value != ours:
                raise DisagreementError(
                    f"rank {rank} has another {name} than rank 0 ({value} and {ours}); give every "
                    "rank the same arguments"
                )
