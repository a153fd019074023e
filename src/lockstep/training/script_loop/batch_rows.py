"""Values of all micro-batches of a step on every rank, the same bits for any number of ranks.

    add_exactly     a number per micro-batch      their sum
    gather_rows     tensors per micro-batch       their rows, one per sample, in the batch's order

Both are collective calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from lockstep.kernel.errors import UsageError
from lockstep.kernel.exact_sum import add_over_ranks, round_sum
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.step_context import StepContext
from lockstep.model.group_exchange import END

__all__ = ["add_exactly", "find_microbatch_rows", "gather_rows"]


def find_microbatch_rows(step: StepContext) -> list[range]:
    """Return the positions of the samples of every micro-batch in the batch."""
    assert step.batch is not None
    return split_evenly(step.batch.size, step.batch.leaves)


def add_exactly(step: StepContext, values: Sequence[float]) -> float:
    """Return the sum of the values of all micro-batches, of which this rank has some."""
    label = step.label
    about = f"adding values of micro-batches {label.about}"
    return round_sum(add_over_ranks(values, step.parallel.messages, about, label.remark))


def gather_rows(
    step: StepContext,
    rows: Mapping[int, Sequence[Any]],
    device: torch.device,
    *,
    is_part: bool = False,
) -> list[torch.Tensor]:
    """Return the rows of all micro-batches in the order of the batch.

    Args:
        step: The context of the step.
        rows: By micro-batch of this rank, tensors with one row per sample, which are detached.
        device: The device of the result.
        is_part: Whether an observer has selected some micro-batches; the others get zeros.

    Raises:
        UsageError: On every rank, if tensors do not fit together or a micro-batch has none.
    """
    assert step.batch is not None
    label = step.label
    leaves = step.batch.leaves
    spans = find_microbatch_rows(step)
    problem, kinds = _read_kinds(step, rows, spans)
    packed = b""
    if not problem:
        columns = (torch.cat(column).detach() for column in zip(*rows.values(), strict=True))
        parts = (column.flatten().view(torch.uint8).cpu().numpy() for column in columns)
        packed = b"".join(part.tobytes() for part in parts)
    header = json.dumps([problem, kinds, list(rows)]).encode()
    about = f"gathering rows {label.about}"
    messages = step.parallel.messages.gather(header + END + packed, about, label.remark)
    gathered = [(*json.loads(head), data) for head, _, data in (m.partition(END) for m in messages)]
    if problems := [problem for problem, *_ in gathered if problem]:
        raise UsageError(problems[0])
    known = {rank: kinds for rank, (_, kinds, indices, _) in enumerate(gathered) if indices}
    first = next(iter(known), 0)
    if other := next((rank for rank, kinds in known.items() if kinds != known[first]), 0):
        raise UsageError(
            f"rank {other}, step {step.number}: the rows have dtypes and shapes {known[other]}, "
            f"those of rank {first} {known[first]}: let every micro-batch have the same"
        )
    missing = {*range(leaves)}.difference(*(indices for _, _, indices, _ in gathered))
    if not known or (missing and not is_part):
        raise UsageError(
            f"step {step.number}: {len(missing)} of {leaves} micro-batches have no rows, such as "
            f"micro-batch {min(missing)}: pass one tensor per micro-batch, in their order"
        )
    result = [
        torch.zeros(step.batch.size, *shape, dtype=getattr(torch, dtype))
        for dtype, *shape in known[first]
    ]
    for _, _, indices, data in gathered:
        position = 0
        own = [row for index in indices for row in spans[index]]
        for column in result:
            count = len(own) * prod(column.shape[1:]) * column.element_size()
            part = bytearray(data[position : position + count] + END)  # which is never empty
            raw = torch.frombuffer(part, dtype=torch.uint8)[:count]
            column[own] = raw.view(column.dtype).view(len(own), *column.shape[1:])
            position += count
    return [column.to(device) for column in result]


def _read_kinds(
    step: StepContext, rows: Mapping[int, Sequence[Any]], spans: Sequence[range]
) -> tuple[str, list[Any]]:
    """Return what is wrong with this rank's rows, "" for nothing, and their dtypes and shapes."""
    kinds: list[Any] = []
    for index, tensors in rows.items():
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (len(spans[index]),):
                given = type(tensor).__name__
                if isinstance(tensor, torch.Tensor):
                    given = f"tensor of shape {tuple(tensor.shape)}"
                return (
                    f"{step.place(index)}: a {given} was given for the {len(spans[index])} samples "
                    "of the micro-batch: return tensors with one row per sample, such as a tuple "
                    "of one tensor per view",
                    [],
                )
        described = [[str(t.dtype).removeprefix("torch."), *t.shape[1:]] for t in tensors]
        if kinds and described != kinds:
            return (
                f"{step.place(index)}: the rows have dtypes and shapes {described}, those of an "
                f"earlier micro-batch {kinds}: let every micro-batch have the same",
                [],
            )
        kinds = described
    return "", kinds
