"""The status of a rank in a step, which the ranks exchange in one small message.

Each rank reports on the micro-batches that it computed. Every rank then has all statuses and
derives the same values from them: the loss, whether it is finite, the metrics, which buffers to
merge. The messages are JSON: floats keep every bit, and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch.distributed as dist

from lockstep.comm.collectives import all_gather_bytes
from lockstep.comm.tree import total
from lockstep.model.buffers import BufferHash
from lockstep.model.step_context import MicrobatchResult, Span, StepLabel

__all__ = [
    "RankStatus",
    "StepTrace",
    "average_metrics",
    "exchange_statuses",
    "find_non_finite",
    "list_losses",
    "make_span_row",
    "make_timeline_rows",
    "read_peak_memory",
    "sum_losses",
]


@dataclass(frozen=True)
class RankStatus:
    """The report of one rank on its part of a step.

    Attributes:
        microbatches: The results of the micro-batches that the rank computed.
        buffers: The hashes of the buffers, for each part of the model that the rank holds: the
            whole model, or its stages.
        compute: Seconds of forward and backward.
        data: Seconds of loading the batch.
        memory: Peak resident memory in bytes.
        gradients: The parameters of each part that have a gradient here, as a bit mask in hex.
        warnings: Sentences for the record.
        failure: The error that stops the step on every rank; "" for none.
        side_effect: The forbidden write of forward, which stops the step, too; "" for none.
        weights: A hash of the parameters and buffers before the step; "" if not checked.
        settings: A hash of the settings of the step; see `lockstep.training.live_settings`.
        stopped: The reason why a stage could not continue, with its place; "" for none.
        idle: Seconds that a stage waited for its neighbours; not part of `compute`.
        spans: The rows of `make_span_row` for the rank's work; empty if the step is not traced.
        begun: The time at which the step began, by rank 0's clock; only with `spans`.
        batch: The identity of the rank's batch; see `lockstep.data.consistency`.
        is_checkpoint_due: Whether rank 0 wants a checkpoint after the step.
        stop: The signal that asked this rank to stop; "" for none.
        admits: The round of an elastic run in which, as rank 0 knows, processes wait to join or
            have to leave; -1 for none.
    """

    microbatches: list[MicrobatchResult] = field(default_factory=list)
    buffers: list[list[BufferHash]] = field(default_factory=list)
    compute: float = 0.0
    data: float = 0.0
    memory: int = 0
    gradients: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: str = ""
    side_effect: str = ""
    weights: str = ""
    settings: str = ""
    stopped: str = ""
    idle: float = 0.0
    spans: list[list[Any]] = field(default_factory=list)
    begun: float = 0.0
    batch: str = ""
    is_checkpoint_due: bool = False
    stop: str = ""
    admits: int = -1


def exchange_statuses(
    status: RankStatus, label: StepLabel, group: dist.ProcessGroup | None = None
) -> list[RankStatus]:
    """Return the status of every rank, in rank order.

    Raises:
        DisagreementError: Ranks take different steps.
    """
    if dist.get_world_size(group) == 1:
        return [status]
    message = json.dumps(vars(status), default=vars).encode()
    messages = all_gather_bytes(message, label.about, group, label.remark)
    return [_read(message) for message in messages]


def read_peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _read(message: bytes) -> RankStatus:
    content = json.loads(message)
    content["microbatches"] = [MicrobatchResult(**each) for each in content["microbatches"]]
    return RankStatus(**content)


def _microbatches(statuses: Iterable[RankStatus]) -> list[MicrobatchResult]:
    found = (each for status in statuses for each in status.microbatches)
    return sorted(found, key=lambda each: each.leaf)


def find_non_finite(statuses: Sequence[RankStatus]) -> tuple[int, MicrobatchResult] | None:
    """Return (rank, micro-batch) of the first loss that is NaN or infinite, if any."""
    found = [
        (each.leaf, rank, each)
        for rank, status in enumerate(statuses)
        for each in status.microbatches
        if not math.isfinite(each.loss)
    ]
    return min(found)[1:] if found else None


def list_losses(statuses: Iterable[RankStatus], leaves: int) -> list[float | None]:
    """Return the loss of each micro-batch; None for one of weight 0, which is not computed."""
    found: list[float | None] = [None] * leaves
    for status in statuses:
        for each in status.microbatches:
            found[each.leaf] = each.loss
    return found


def sum_losses(statuses: Iterable[RankStatus], leaves: int) -> float:
    """Return the loss of the batch.

    The losses of the micro-batches, times their shares, are added in float64 along the tree.
    """
    terms = dict.fromkeys(((leaf, leaf + 1) for leaf in range(leaves)), 0.0)
    for each in _microbatches(statuses):
        terms[each.leaf, each.leaf + 1] = each.loss * each.share
    return total(terms, leaves, add)


def average_metrics(statuses: Iterable[RankStatus]) -> dict[str, float]:
    """Return each metric's mean over the samples of the micro-batches that reported it."""
    results = _microbatches(statuses)
    names = dict.fromkeys(name for each in results for name in each.metrics)
    return {
        name: math.fsum(each.metrics[name] * each.size for each in results if name in each.metrics)
        / sum(each.size for each in results if name in each.metrics)
        for name in names
    }


# --- the trace of a step -------------------------------------------------------------------------

FIRST, EVERY = 10, 100
DIGITS = 6  # decimal digits of a second


@dataclass(frozen=True)
class StepTrace:
    """The tracing of some steps; `offset` is the `clock_offset` of this rank, in seconds."""

    offset: float = 0.0

    def covers(self, step: int) -> bool:
        """Return whether this step is traced."""
        return step < FIRST or step % EVERY == 0

    def rank0_time(self, begun: float) -> float:
        """Convert a time of this rank's `time.perf_counter` to rank 0's clock."""
        return round(begun + self.offset, DIGITS)


def make_span_row(span: Span, begun: float) -> list[Any]:
    """Return a span as a row of the record; it begins when the waiting is over."""
    begin = span.begin + span.waited - begun
    rounded = [round(each, DIGITS) for each in (begin, span.end - begun, span.waited)]
    source = None if span.source < 0 else span.source
    return [span.kind, span.stage, span.microbatch, *rounded, source, span.received]


def make_timeline_rows(
    statuses: Sequence[RankStatus], times: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Return the rows of a line "timeline", one per rank; none if the step was not traced.

    Args:
        statuses: The statuses of all ranks.
        times: The times, by rank 0's clock, at which rank 0 had exchanged the statuses, reduced
            the gradients and stepped the optimizer. Each of these ends together on all ranks.
    """
    if not any(status.spans for status in statuses):
        return []
    rows = []
    for status in statuses:
        begin, middle, end = (round(time - status.begun, DIGITS) for time in times)
        update = [
            ["reduce", None, None, begin, middle, 0, None, 0],
            ["update", None, None, middle, end, 0, None, 0],
        ]
        rows.append({"begin": status.begun, "works": status.spans + update})
    return rows
