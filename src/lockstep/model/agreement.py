"""Agreement: all ranks begin with the same settings and weights, or say where theirs differ.

rank           0      1      2      3          2 replicas of 2 stages
block 0      alive    -    alive    -          rank 0 gives it to rank 2
block 1        -    alive    -    alive        rank 1 gives it to rank 3
                     (-: on the meta device, known by names and shapes only)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from lockstep.comm.collectives import all_gather_bytes, broadcast_tensors, send_tensors
from lockstep.errors import DisagreementError, UsageError
from lockstep.model.deferred_init import materialize, named_tensors
from lockstep.model.description import difference

__all__ = ["give_weights", "require_same"]

WITHOUT, WANTED, HELD = 0, 1, 2
"""What a rank says of a tensor: it needs none, it needs it and lacks it, it has it."""

TOPIC = "comparing settings"


def require_same(
    description: Mapping[str, str], advice: str, group: dist.ProcessGroup | None = None
) -> None:
    """Compare what decides the bits; the ranks exchange 16 bytes where it is the same.

    Args:
        description: Values by entry, of this rank.
        advice: How to make them the same, the end of the message.
        group: The ranks to compare.

    Raises:
        DisagreementError: On every rank alike, with the first entry that differs, the rank
            that differs from most, and both values.
    """
    lines = "\n".join(f"{entry}\t{value}" for entry, value in description.items())
    summary = xxhash.xxh3_128_digest(lines.encode(errors="surrogatepass"))
    if len(set(all_gather_bytes(summary, TOPIC, group))) == 1:
        return
    message = zlib.compress(json.dumps(description).encode())
    everyone = all_gather_bytes(message, f"{TOPIC}, which differ", group)
    found = difference([json.loads(zlib.decompress(each)) for each in everyone])
    if found is not None:
        raise DisagreementError(found.sentence(advice))


def give_weights(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    device: str | torch.device = "cpu",
    needed: Callable[[str], bool] = lambda name: True,
) -> None:
    """Give every rank the parameters and buffers of the first rank that has them.

    Names, shapes, strides and dtypes are the same on all ranks. What is on the meta device
    here gets memory on `device` where it is `needed`.

    Raises:
        UsageError: No rank has what some rank needs.
    """
    marks = [
        (WANTED if needed(name) else WITHOUT) if tensor.is_meta else HELD
        for name, tensor in named_tensors(module).items()
    ]
    everyone = all_gather_bytes(bytes(marks), "giving weights to each other", group)
    plan = _plan(list(named_tensors(module)), everyone)
    materialize(module, device, needed)
    tensors = list(named_tensors(module).values())
    for (source, takers), numbers in plan.items():
        given = [tensors[number] for number in numbers]
        if len(takers) == len(everyone):
            broadcast_tensors(given, group, source)
        else:
            send_tensors(given, group, source, takers)


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
