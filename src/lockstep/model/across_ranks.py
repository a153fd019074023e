"""Across ranks: all start with the same settings and weights; differences raise an error.

rank           0      1      2      3          2 replicas of 2 stages
block 0      memory   -    memory   -          rank 0 sends it to rank 2
block 1        -    memory   -    memory       rank 1 sends it to rank 3
                     (-: on the meta device, with names and shapes only)
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from lockstep.comm.collectives import (
    all_gather_bytes,
    broadcast_tensors,
    gather_unless_equal,
    send_tensors,
)
from lockstep.kernel.errors import DisagreementError, UsageError
from lockstep.model.deferred_init import materialize, named_tensors
from lockstep.model.description import ARITHMETIC, find_difference
from lockstep.portable.arithmetic_difference import advise, name_differences
from lockstep.processor_core import processor_name
from lockstep.sharded_tensors import is_sharded

__all__ = ["broadcast_weights", "find_missing", "verify_across_ranks"]

WITHOUT = 0
WANTED = 1
HELD = 2
"""The state of a tensor on a rank: not needed, needed but without memory, with memory."""

TOPIC = "comparing settings"


def verify_across_ranks(
    what: str,
    description: Mapping[str, str],
    advice: str,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compare the settings that determine results. Equal settings need only a hash of 16 bytes.

    Args:
        what: What is compared, such as "the model of a Trainer", the same on every rank.
        description: The settings of this rank: values by entry.
        advice: The end of the error message, which says how to make them equal.
        group: The group of the ranks to compare.

    Raises:
        DisagreementError: The settings differ. Raised on every rank, with the first entry that
            differs, the rank that differs from the majority, and both values.
    """
    lines = "\n".join([what, *(f"{entry}\t{value}" for entry, value in description.items())])
    summary = xxhash.xxh3_128_digest(lines.encode(errors="surrogatepass"))
    if not gather_unless_equal(summary, TOPIC, group):
        return
    message = zlib.compress(json.dumps([what, description, _describe_processor()]).encode())
    received = all_gather_bytes(message, f"{TOPIC}, which differ", group)
    sent = [json.loads(zlib.decompress(message)) for message in received]
    subjects, descriptions, processors = zip(*sent, strict=True)
    odd = next((rank for rank, subject in enumerate(subjects) if subject != subjects[0]), None)
    if odd is not None:
        raise DisagreementError(
            f"rank 0 compares {subjects[0]}, rank {odd} {subjects[odd]}: construct the same "
            "objects in the same order on every rank; if one rank catches an exception, all must"
        )
    difference = find_difference(descriptions)
    if difference is not None and difference.entry == ARITHMETIC:
        odd = difference.odd
        other = difference.other
        ours, theirs = (descriptions[rank][ARITHMETIC] for rank in (odd, other))
        raise DisagreementError(
            f"rank {odd} ({processors[odd]}) computes {name_differences(ours, theirs)} "
            f"with other bits than rank {other} ({processors[other]}); "
            f"{advise(ours, theirs)}"
        )
    if difference is not None:
        raise DisagreementError(difference.format_message(advice))


def _describe_processor() -> str:
    """Return the host, the processor and the instructions that torch uses, in words."""
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"host {socket.gethostname()}, {processor_name()}, {instructions}"


def find_missing(module: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the names of the parameters and buffers that are on the meta device on every rank."""
    tensors = named_tensors(module)
    marks = bytes(tensor.is_meta for tensor in tensors.values())
    everyone = all_gather_bytes(marks, "looking for weights", group)
    return [name for name, *held in zip(tensors, *everyone, strict=True) if all(held)]


def broadcast_weights(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    device: str | torch.device = "cpu",
    needed: Callable[[str], bool] = lambda name: True,
) -> None:
    """Send parameters and buffers to every rank, from the first rank that has them.

    Sharded parameters are left as they are. Names, shapes, strides and dtypes must be the same on
    all ranks.

    Args:
        module: The module.
        group: The group of the ranks.
        device: The device for tensors that are on the meta device on this rank.
        needed: A function of a tensor's name that returns whether this rank needs the tensor.

    Raises:
        UsageError: No rank has a tensor that some rank needs.
    """
    whole = {name: one for name, one in named_tensors(module).items() if not is_sharded(one)}
    marks = [
        (WANTED if needed(name) else WITHOUT) if tensor.is_meta else HELD
        for name, tensor in whole.items()
    ]
    everyone = all_gather_bytes(bytes(marks), "broadcasting weights", group)
    plan = _plan(list(whole), everyone)
    materialize(module, device, needed)
    made = named_tensors(module)
    tensors = [made[name] for name in whole]
    for (source, takers), numbers in plan.items():
        given = [tensors[number] for number in numbers]
        if len(takers) == len(everyone):
            broadcast_tensors(given, group, source)
        else:
            send_tensors(given, group, source, takers)


def _plan(
    names: Sequence[str], everyone: Sequence[bytes]
) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Return the numbers of the tensors by their source rank and the ranks that need them."""
    plan: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, name in enumerate(names):
        states = [marks[number] for marks in everyone]
        takers = tuple(rank for rank, mark in enumerate(states) if mark != WITHOUT)
        if takers and HELD not in states:
            raise UsageError(
                f"{name} is on the meta device on every rank, so no rank has its weights: load "
                "them on one rank, or pass the model's blocks as a list of callables, which build "
                "them on the ranks that need them"
            )
        if takers:
            plan.setdefault((states.index(HELD), takers), []).append(number)
    return plan
