"""The exchange of the statuses of a step between the ranks.

The messages are JSON: floats keep every bit, and nothing is unpickled. The gradients of a small
model follow them (`GradientReducer.pack`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from functools import partial, reduce

import orjson
import torch.distributed as dist

from lockstep.comm.collectives import all_gather_bytes, all_reduce_messages, has_many_ranks
from lockstep.model.rank_status import StatusSummary
from lockstep.model.step_context import StepLabel
from lockstep.model.step_hooks import StepHook

__all__ = ["exchange_statuses", "pack", "unpack"]

END = b"\0"
"""The end of a summary in a message; JSON does not contain it."""

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
    return StatusSummary.from_plain(values, hooks)


def exchange_statuses(
    summary: StatusSummary,
    hooks: Mapping[str, StepHook],
    label: StepLabel,
    group: dist.ProcessGroup | None = None,
    gradients: bytes = b"",
) -> tuple[StatusSummary, list[bytes]]:
    """Return the summary of the statuses of all ranks, from that of this rank.

    Args:
        summary: The summary of this rank.
        hooks: The hooks that have values in it, by their names.
        label: The label of the step.
        group: The ranks.
        gradients: What `GradientReducer.pack` returned; it is sent with the status.

    Returns:
        The summary, and the messages of all ranks, which end with their gradients.

    Raises:
        DisagreementError: Ranks take different steps.
    """
    merge, read = partial(StatusSummary.merge, hooks=hooks), partial(unpack, hooks=hooks)
    about, remark = label.about, label.remark
    if has_many_ranks(group):
        return all_reduce_messages(summary, merge, pack, read, about, group, remark), []
    messages = all_gather_bytes(pack(summary) + END + gradients, about, group, remark)
    return reduce(merge, (read(message[: message.index(END)]) for message in messages)), messages
