"""The messages of a step between the ranks, and the exchange of their statuses.

The messages are JSON: floats keep every bit, and nothing is unpickled. The gradients of a small
model follow them (`GradientReducer.pack`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import orjson
import torch.distributed as dist

from lockstep.comm.collectives import (
    all_gather_bytes,
    all_reduce_messages,
    gather_unless_equal,
)
from lockstep.data.consistency import require_same_batch
from lockstep.kernel.buffers import BufferReport
from lockstep.kernel.layout import Messages
from lockstep.kernel.rank_status import MetricSum, NonFiniteLoss, StatusSummary
from lockstep.kernel.step_context import StepLabel, StepWarning
from lockstep.kernel.step_hooks import StepHook

__all__ = ["END", "GroupMessages", "exchange_statuses", "pack", "unpack"]

Value = TypeVar("Value")

END = b"\0"
"""The end of the JSON in a message, which does not contain it."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def pack(summary: StatusSummary) -> bytes:
    """Return the bytes to send."""
    # orjson is several times faster, but writes null for NaN and infinity, and refuses lone
    # surrogates, which names of files may contain. A space marks what it must not read.
    sums = (value for *_, value in summary.nodes)
    if summary.non_finite is None and not summary.metrics and all(map(math.isfinite, sums)):
        with contextlib.suppress(orjson.JSONEncodeError):
            return orjson.dumps(tuple(summary), default=tuple)
    return b" " + _encode(summary).encode()


def unpack(message: bytes, hooks: Mapping[str, StepHook]) -> StatusSummary:
    """Return the summary from the result of `pack`."""
    values = (json if message.startswith(b" ") else orjson).loads(message)
    for number, convert in CONVERSIONS.items():
        if values[number]:
            values[number] = convert(values[number])
    summary = StatusSummary(*values)
    for name, value in summary.hooks.items():
        summary.hooks[name] = hooks[name].decode(value)
    return summary


def _make_tuples(lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return [tuple(values) for values in lists]


def _read_buffers(values: dict[str, Any]) -> dict[str, list[BufferReport]]:
    return {place: [BufferReport(*fields) for fields in parts] for place, parts in values.items()}


def _read_metrics(values: dict[str, Any]) -> dict[str, MetricSum]:
    return {name: (weights, sums) for name, (weights, sums) in values.items()}


def _read_warnings(values: Sequence[Any]) -> list[tuple[int, StepWarning]]:
    return [(rank, StepWarning(*fields)) for rank, fields in values]


READERS: dict[str, Callable[[Any], Any]] = {
    "failure": tuple,
    "non_finite": lambda values: NonFiniteLoss(*values),
    "buffers": _read_buffers,
    "nodes": _make_tuples,
    "losses": _make_tuples,
    "metrics": _read_metrics,
    "warnings": _read_warnings,
}
"""How fields are read from JSON, which has lists for all tuples."""

CONVERSIONS = {StatusSummary._fields.index(name): read for name, read in READERS.items()}


class GroupMessages:
    """Messages between the ranks of a process group.

    Args:
        group: The ranks; None for all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def gather(self, message: bytes, about: str, remark: str = "") -> list[bytes]:
        """Return the messages of all ranks."""
        return all_gather_bytes(message, about, self._group, remark)

    def reduce(
        self,
        value: Value,
        merge: Callable[[Value, Value], Value],
        pack: Callable[[Value], bytes],
        unpack: Callable[[bytes], Value],
        about: str,
        remark: str = "",
    ) -> Value:
        """Return the merged values of all ranks, in rank order."""
        return all_reduce_messages(
            value, merge, pack, unpack, about, group=self._group, remark=remark
        )

    def require_same_batch(self, batch: str, about: str, step: int, remark: str) -> None:
        """Raise DisagreementError, on every rank, if the identity of the batch differs."""
        batches = gather_unless_equal(batch.encode(), about, self._group, remark)
        if batches:
            require_same_batch([message.decode() for message in batches], step)


def exchange_statuses(
    messages: Messages,
    summary: StatusSummary,
    hooks: Mapping[str, StepHook],
    label: StepLabel,
    gradients: bytes = b"",
) -> tuple[StatusSummary, list[bytes]]:
    """Return the summary of the statuses of all ranks, from that of this rank.

    Args:
        messages: The messages between the ranks.
        summary: The summary of this rank.
        hooks: The hooks that have values in it, by their names.
        label: The label of the step.
        gradients: What `GradientReducer.pack` returned; it is sent with the status.

    Returns:
        The summary, and the messages of all ranks, which end with their gradients.

    Raises:
        DisagreementError: Ranks take different steps.
    """
    merge = partial(StatusSummary.merge, hooks=hooks)
    read = partial(unpack, hooks=hooks)
    about = label.about
    remark = label.remark
    packed = messages.gather(pack(summary) + END + gradients, about, remark)
    return reduce(merge, (read(message[: message.index(END)]) for message in packed)), packed
