"""The status of a rank in a step, and what all ranks need to know of the statuses of all.

    RankStatus of rank 0 ──> StatusSummary ─┐
    RankStatus of rank 1 ──> StatusSummary ─┴─ merge ─┐
    RankStatus of rank 2 ──> StatusSummary ─┐         ├─ merge ──> StatusSummary, on every rank
    RankStatus of rank 3 ──> StatusSummary ─┴─ merge ─┘

Each rank reports on the micro-batches that it computed. Every rank then has the summary of all
statuses and derives the same values from it: the loss, whether it is finite, the metrics, which
buffers to merge. Merging is associative, so the summary does not depend on how ranks are grouped.
Above `DETAILED_RANKS` ranks its size does not depend on their number either: losses are added along
the tree, metrics without rounding, and times, memory and warnings of a few ranks are listed. Where
an error needs more, such as which ranks differ, the failed step has a second exchange.

The messages are JSON: floats keep every bit, and nothing is unpickled. The gradients of a small
model follow them (`GradientReducer.pack`).
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import orjson
import torch.distributed as dist

from lockstep.comm.collectives import all_gather_bytes, all_reduce_messages, has_many_ranks
from lockstep.comm.exact_sum import ExactSum, add_exactly
from lockstep.kernel.tree import TreeAccumulator
from lockstep.model.buffers import BufferReport, merge_reports
from lockstep.model.loss_check import NOT_ADDITIVE
from lockstep.model.step_context import IGNORED_TARGETS, MicrobatchResult, Span, StepLabel
from lockstep.record.rank_summary import DETAILED_RANKS, RankTimes, RankUsage

__all__ = [
    "NonFiniteLoss",
    "PeakMemory",
    "RankStatus",
    "StatusPlace",
    "StatusSummary",
    "StepTrace",
    "exchange_statuses",
    "make_span_row",
    "make_timeline_rows",
    "summarize",
]

MEMORY_INTERVAL = 0.02
"""Seconds between two readings of the peak memory."""

LISTED_WARNINGS = 16
"""The number of different warnings that a step of more than `DETAILED_RANKS` ranks reports."""


@dataclass(frozen=True)
class RankStatus:
    """The report of one rank on its part of a step.

    Attributes:
        microbatches: The results of the micro-batches that the rank computed.
        skipped: The micro-batches of the rank that have weight 0, if it computed others.
        buffers: The results for the buffers of each part of the model that the rank holds: the
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
        writer: Whether this rank wrote shared parameters since the last step, or the writer is
            unknown, and the name of one; None if they were not written.
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
    skipped: list[int] = field(default_factory=list)
    buffers: list[BufferReport] = field(default_factory=list)
    compute: float = 0.0
    data: float = 0.0
    memory: int = 0
    gradients: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: str = ""
    side_effect: str = ""
    weights: str = ""
    settings: str = ""
    writer: tuple[bool, str] | None = None
    stopped: str = ""
    idle: float = 0.0
    spans: list[list[Any]] = field(default_factory=list)
    begun: float = 0.0
    batch: str = ""
    is_checkpoint_due: bool = False
    stop: str = ""
    admits: int = -1


class StatusPlace(NamedTuple):
    """The place of a status among those of all ranks.

    Attributes:
        rank: The rank.
        ranks: The number of ranks.
        replica: The replica of the rank.
        position: The place of the rank in its replica, from 0 to the number of stages.
        leaves: The number of micro-batches of the batch.
    """

    rank: int
    ranks: int
    replica: int
    position: int
    leaves: int


class NonFiniteLoss(NamedTuple):
    """A loss that is NaN or infinite.

    Attributes:
        leaf: The index of its micro-batch.
        rank: The rank that computed it.
        loss: The loss.
        ignores_targets: Whether the rank warned that the loss ignores some targets.
    """

    leaf: int
    rank: int
    loss: float
    ignores_targets: bool


class StatusSummary(NamedTuple):
    """The statuses of a contiguous range of ranks.

    A value that must be equal on all ranks is None if it differs between two of them.

    Attributes:
        leaves: The number of micro-batches of the batch.
        batch: The identity of the batch.
        settings: The hash of the settings.
        weights: For each position in a replica, the hash of the parameters and buffers.
        failure: The first rank that stops the step, as (rank, kind, sentence); the kind is the name
            of a field of `RankStatus`. None: no rank does.
        writers: The last two ranks that wrote shared parameters since the last step, with the name
            of one. The rank is -1 where the writer is unknown.
        non_finite: The loss of the first micro-batch that is not finite; None: there is none.
        gradients: For each position and part, the parameters that have a gradient on some rank.
        buffers: For each position and part, the results for the buffers.
        nodes: The losses times their shares, added along the tree, as (first leaf, end, sum).
        losses: The index and the loss of each micro-batch, if the ranks are few.
        metrics: For each metric the number of samples, and the sum of the values times samples.
        warnings: The first rank that has each warning, and the warning.
        usage: The times and the memory of the ranks.
        is_checkpoint_due: Whether the lowest rank wants a checkpoint.
        stop: The signal that asked a rank to stop; "" for none.
        admits: The value of the lowest rank.
        spans: The traced work of the first `DETAILED_RANKS` ranks, as (begun, spans).
    """

    leaves: int
    batch: str | None
    settings: str | None
    weights: dict[str, str | None]
    failure: tuple[int, str, str] | None
    writers: list[tuple[int, str]]
    non_finite: NonFiniteLoss | None
    gradients: dict[str, list[str]]
    buffers: dict[str, list[BufferReport]]
    nodes: list[tuple[int, int, float]]
    losses: list[tuple[int, float]]
    metrics: dict[str, tuple[int, ExactSum]]
    warnings: list[tuple[int, str]]
    usage: RankUsage
    is_checkpoint_due: bool
    stop: str
    admits: int
    spans: list[tuple[float, list[Any]]]

    def merge(self, other: StatusSummary) -> StatusSummary:
        """Return the summary of this range of ranks and the following one."""
        return StatusSummary(
            leaves=self.leaves,
            batch=_keep_equal(self.batch, other.batch),
            settings=_keep_equal(self.settings, other.settings),
            weights=_merge_by_name(self.weights, other.weights, _keep_equal),
            failure=_choose_failure(self.failure, other.failure),
            writers=_merge_writers(self.writers, other.writers),
            non_finite=_find_first(self.non_finite, other.non_finite),
            gradients=_merge_by_name(self.gradients, other.gradients, _merge_masks),
            buffers=_merge_by_name(self.buffers, other.buffers, _merge_buffers),
            nodes=_add_nodes(self.nodes, other.nodes, self.leaves),
            losses=self.losses + other.losses,
            metrics=_merge_by_name(self.metrics, other.metrics, _add_metrics),
            warnings=self._merge_warnings(other),
            usage=self.usage.merge(other.usage),
            is_checkpoint_due=self.is_checkpoint_due,
            stop=self.stop or other.stop,
            admits=self.admits,
            spans=self.spans + other.spans,
        )

    def _merge_warnings(self, other: StatusSummary) -> list[tuple[int, str]]:
        if not other.warnings:
            return self.warnings
        first: dict[str, tuple[int, str]] = {}
        for rank, message in self.warnings + other.warnings:
            first.setdefault(_sentence(message), (rank, message))
        return list(first.values())[: LISTED_WARNINGS if self.usage.spread else None]

    def pack(self) -> bytes:
        """Return the bytes to send."""
        # orjson is several times faster, but writes null for NaN and infinity, and refuses lone
        # surrogates, which names of files may contain. A space marks what it must not read.
        sums = (value for *_, value in self.nodes)
        if self.non_finite is None and not self.metrics and all(map(math.isfinite, sums)):
            with contextlib.suppress(orjson.JSONEncodeError):
                return orjson.dumps(tuple(self), default=tuple)
        return b" " + _encode(self).encode()

    @classmethod
    def unpack(cls, message: bytes) -> StatusSummary:
        """Return the summary from the result of `pack`."""
        found: list[Any] = (json if message.startswith(b" ") else orjson).loads(message)
        for number, convert in CONVERSIONS.items():
            if found[number]:
                found[number] = convert(found[number])
        return cls(*found)

    # --- what the ranks conclude ---------------------------------------------------------------

    def list_losses(self) -> list[float | None]:
        """Return the loss of each micro-batch; None for one of weight 0, which is not computed.

        Returns:
            The losses; empty if there are more than `DETAILED_RANKS` ranks.
        """
        if self.usage.spread:
            return []
        known = dict(self.losses)
        return [known.get(leaf) for leaf in range(self.leaves)]

    def sum_losses(self) -> float:
        """Return the loss of the batch.

        The losses of the micro-batches, times their shares, are added in float64 along the tree.
        Micro-batches that were not computed add 0.
        """
        fold: TreeAccumulator[float] = TreeAccumulator(self.leaves, add)
        begin = 0
        for lo, hi, value in [*sorted(self.nodes), (self.leaves, self.leaves, 0.0)]:
            for leaf in range(begin, lo):
                fold.put((leaf, leaf + 1), 0.0)
            if lo < hi:
                fold.put((lo, hi), value)
            begin = hi
        (result,) = fold.nodes.values()
        return result

    def average_metrics(self) -> dict[str, float]:
        """Return each metric's mean over the samples of the micro-batches that reported it."""
        return {name: float(value) / samples for name, (samples, value) in self.metrics.items()}


def _make_tuples(lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return [tuple(each) for each in lists]


def _read_buffers(found: dict[str, Any]) -> dict[str, list[BufferReport]]:
    return {place: [BufferReport(*each) for each in parts] for place, parts in found.items()}


def _read_metrics(found: dict[str, Any]) -> dict[str, tuple[int, ExactSum]]:
    return {name: (samples, ExactSum(*value)) for name, (samples, value) in found.items()}


READERS: dict[str, Callable[[Any], Any]] = {
    "failure": tuple,
    "writers": _make_tuples,
    "non_finite": lambda found: NonFiniteLoss(*found),
    "buffers": _read_buffers,
    "nodes": _make_tuples,
    "losses": _make_tuples,
    "metrics": _read_metrics,
    "warnings": _make_tuples,
    "usage": RankUsage.unpack,
    "spans": _make_tuples,
}
"""How fields are read from JSON, which has lists for all tuples."""

CONVERSIONS = {StatusSummary._fields.index(name): read for name, read in READERS.items()}

END = b"\0"
"""The end of a summary in a message; JSON does not contain it."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


def summarize(status: RankStatus, place: StatusPlace) -> StatusSummary:
    """Return the summary of the status of one rank."""
    results, rank, position = status.microbatches, place.rank, str(place.position)
    writer = status.writer
    is_detailed = place.ranks <= DETAILED_RANKS
    kinds = ("side_effect", "stopped", "failure")
    failed = next((kind for kind in kinds if getattr(status, kind)), None)
    lost = [each for each in results if not math.isfinite(each.loss)]
    non_finite = None
    if lost:
        first = min(lost, key=lambda each: each.leaf)
        marks = IGNORED_TARGETS, NOT_ADDITIVE
        ignores = any(mark in each for each in status.warnings for mark in marks)
        non_finite = NonFiniteLoss(first.leaf, rank, first.loss, ignores)
    times = RankTimes(rank, status.compute, status.data, status.idle, status.memory)
    terms = [(each.leaf, each.leaf + 1, each.loss * each.share) for each in results]
    terms += [(leaf, leaf + 1, 0.0) for leaf in status.skipped]
    warnings = {_sentence(message): (rank, message) for message in reversed(status.warnings)}
    return StatusSummary(
        leaves=place.leaves,
        batch=status.batch,
        settings=status.settings,
        weights={position: status.weights},
        failure=None if failed is None else (rank, failed, getattr(status, failed)),
        writers=[] if writer is None else [(rank if writer[0] else -1, writer[1])],
        non_finite=non_finite,
        gradients={position: status.gradients},
        buffers={position: [each.of_replica(place.replica) for each in status.buffers]},
        nodes=_add_nodes((), terms, place.leaves),
        losses=[(each.leaf, each.loss) for each in results] if is_detailed else [],
        metrics=_sum_metrics(results),
        warnings=list(reversed(warnings.values())),
        usage=RankUsage.of(times, place.ranks),
        is_checkpoint_due=status.is_checkpoint_due,
        stop=status.stop,
        admits=status.admits,
        spans=[(status.begun, status.spans)] if status.begun and rank < DETAILED_RANKS else [],
    )


def exchange_statuses(
    summary: StatusSummary,
    label: StepLabel,
    group: dist.ProcessGroup | None = None,
    gradients: bytes = b"",
) -> tuple[StatusSummary, list[bytes]]:
    """Return the summary of the statuses of all ranks, from that of this rank.

    Args:
        summary: The summary of this rank.
        label: The label of the step.
        group: The ranks.
        gradients: What `GradientReducer.pack` returned; it is sent with the status.

    Returns:
        The summary, and the messages of all ranks, which end with their gradients.

    Raises:
        DisagreementError: Ranks take different steps.
    """
    merge, pack, unpack = StatusSummary.merge, StatusSummary.pack, StatusSummary.unpack
    about, remark = label.about, label.remark
    if has_many_ranks(group):
        return all_reduce_messages(summary, merge, pack, unpack, about, group, remark), []
    messages = all_gather_bytes(summary.pack() + END + gradients, about, group, remark)
    return reduce(merge, (unpack(each[: each.index(END)]) for each in messages)), messages


class PeakMemory:
    """The peak resident memory of this process, read at most every `MEMORY_INTERVAL` seconds.

    Reading it takes as long as the forward pass of a tiny model.
    """

    def __init__(self) -> None:
        self._bytes, self._due = 0, -math.inf

    def read(self) -> int:
        """Return the peak in bytes."""
        if (now := time.monotonic()) >= self._due:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._bytes = peak if sys.platform == "darwin" else peak * 1024
            self._due = now + MEMORY_INTERVAL
        return self._bytes


def _sentence(message: str) -> str:
    """Return a warning without its place: "PLACE: SENTENCE"."""
    return message.partition(": ")[2]


def _keep_equal(left: str | None, right: str | None) -> str | None:
    return left if left == right else None


def _find_first(left: NonFiniteLoss | None, right: NonFiniteLoss | None) -> NonFiniteLoss | None:
    found = [each for each in (left, right) if each is not None]
    return min(found, key=lambda each: each.leaf) if found else None


def _merge_by_name(
    left: Mapping[str, Any], right: Mapping[str, Any], merge: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    found = dict(left)
    for name, value in right.items():
        found[name] = merge(found[name], value) if name in found else value
    return found


def _choose_failure(
    left: tuple[int, str, str] | None, right: tuple[int, str, str] | None
) -> tuple[int, str, str] | None:
    """Return the first side effect, which may be why a stage stopped, or else the first failure."""
    failures = [failure for failure in (left, right) if failure is not None]
    return min(failures, key=lambda failure: failure[1] != "side_effect", default=None)


def _merge_writers(
    left: list[tuple[int, str]], right: list[tuple[int, str]]
) -> list[tuple[int, str]]:
    return sorted({*left, *right})[-2:] if left and right else left or right


def _merge_masks(left: list[str], right: list[str]) -> list[str]:
    if left == right:
        return left
    # A rank that stops the step reports no parts, and nothing is reduced.
    return [f"{int(one, 16) | int(two, 16):x}" for one, two in zip(left, right, strict=False)]


def _merge_buffers(left: list[BufferReport], right: list[BufferReport]) -> list[BufferReport]:
    return [merge_reports(one, two) for one, two in zip(left, right, strict=False)]


def _add_metrics(left: tuple[int, ExactSum], right: tuple[int, ExactSum]) -> tuple[int, ExactSum]:
    return left[0] + right[0], add_exactly(left[1], right[1])


def _sum_metrics(results: Sequence[MicrobatchResult]) -> dict[str, tuple[int, ExactSum]]:
    found = {}
    for name in dict.fromkeys(name for each in results for name in each.metrics):
        known = [each for each in results if name in each.metrics]
        terms = (each.metrics[name] * each.size for each in known)
        found[name] = sum(each.size for each in known), ExactSum.of(terms)
    return found


def _add_nodes(
    known: Iterable[tuple[int, int, float]], more: Iterable[tuple[int, int, float]], leaves: int
) -> list[tuple[int, int, float]]:
    """Add nodes of the tree to nodes that are known, as far as siblings are."""
    fold: TreeAccumulator[float] = TreeAccumulator(leaves, add)
    fold.nodes = {(lo, hi): value for lo, hi, value in known}
    for lo, hi, value in more:
        fold.put((lo, hi), value)
    return [(*node, fold.nodes[node]) for node in sorted(fold.nodes)]


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
    summary: StatusSummary, times: tuple[float, float, float]
) -> list[dict[str, Any]]:
    """Return the rows of a line "timeline"; none if the step was not traced.

    There is a row for each of the first `DETAILED_RANKS` ranks.

    Args:
        summary: The summary of the statuses of all ranks.
        times: The times, by rank 0's clock, at which rank 0 had exchanged the statuses, reduced
            the gradients and stepped the optimizer. Each of these ends together on all ranks.
    """
    if not any(spans for _, spans in summary.spans):
        return []
    rows = []
    for begun, spans in summary.spans:
        begin, middle, end = (round(time - begun, DIGITS) for time in times)
        update = [
            ["reduce", None, None, begin, middle, 0, None, 0],
            ["update", None, None, middle, end, 0, None, 0],
        ]
        rows.append({"begin": begun, "works": spans + update})
    return rows
