"""The status of a rank in a step, and what all ranks need to know of the statuses of all.

    RankStatus of rank 0 ──> StatusSummary ─┐
    RankStatus of rank 1 ──> StatusSummary ─┴─ merge ─┐
    RankStatus of rank 2 ──> StatusSummary ─┐         ├─ merge ──> StatusSummary, on every rank
    RankStatus of rank 3 ──> StatusSummary ─┴─ merge ─┘

Each rank reports on the micro-batches that it computed. Every rank then has the summary of all
statuses and derives the same values from it: the loss, whether it is finite, the metrics, which
buffers to merge. Merging is associative, so the summary does not depend on how ranks are grouped.
Above `DETAILED_RANKS` ranks its size does not depend on their number either: losses are added along
the tree, metrics without rounding, and warnings of a few ranks are listed. Where an error needs
more, such as which ranks differ, the failed step has a second exchange. The values of hooks travel
with the statuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple, Protocol

from lockstep.kernel.buffers import BufferReport, merge_reports
from lockstep.kernel.exact_sum import (
    PartialSums,
    compute_partial_sums,
    merge_partial_sums,
    round_sum,
)
from lockstep.kernel.layout import StepLayout
from lockstep.kernel.parts import Part
from lockstep.kernel.step_context import (
    ComputedMicrobatch,
    MicrobatchResult,
    StepContext,
    StepWarning,
)
from lockstep.kernel.tree import TreeAccumulator, total

__all__ = [
    "DETAILED_RANKS",
    "NonFiniteLoss",
    "RankStatus",
    "StatusHook",
    "StatusSummary",
    "make_status",
    "merge_by_name",
    "summarize",
]

DETAILED_RANKS = 64
"""The largest number of ranks of which every one is listed."""

LISTED_WARNINGS = 16
"""The number of different warnings that a step of more than `DETAILED_RANKS` ranks reports."""


@dataclass(slots=True)
class RankStatus:
    """The report of one rank on its part of a step.

    Attributes:
        microbatches: The results of the micro-batches that the rank computed.
        skipped: The micro-batches of the rank that have weight 0, if it computed others.
        buffers: The results for the buffers of each part of the model that the rank holds: the
            whole model, or its stages.
        gradients: The parameters of each part that have a gradient here, as a bit mask in hex.
        warnings: The warnings, for the record.
        failure: Why the step stops on every rank: the kind, and the sentence; None: it does not.
        batch: The identity of the rank's batch; see `lockstep.data.consistency`.
        hooks: The values of the hooks, by their names.
    """

    microbatches: list[MicrobatchResult] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    buffers: list[BufferReport] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    warnings: list[StepWarning] = field(default_factory=list)
    failure: tuple[str, str] | None = None
    batch: str = ""
    hooks: dict[str, Any] = field(default_factory=dict)


MetricSum = tuple[PartialSums, PartialSums]
"""The exact sum of the weights of a metric, and that of its values times their weights."""


class NonFiniteLoss(NamedTuple):
    """A loss that is NaN or infinite.

    Attributes:
        leaf: The index of its micro-batch.
        rank: The rank that computed it.
        loss: The loss.
    """

    leaf: int
    rank: int
    loss: float


class StatusHook(Protocol):
    """The part of a hook that combines its values of several ranks."""

    def decode(self, value: Any, /) -> Any:
        """Return the value for `merge` from its JSON, which has lists for tuples."""

    def merge(self, left: Any, right: Any, /) -> Any:
        """Return the value of two contiguous ranges of ranks; associative."""


class StatusSummary(NamedTuple):
    """The statuses of a contiguous range of ranks.

    Attributes:
        leaves: The number of micro-batches of the batch.
        ranks: The number of all ranks of the step.
        batch: The identity of the batch; None if it differs between two ranks.
        failure: The first rank that stops the step, as (rank, kind, sentence). None: no rank does.
        non_finite: The loss of the first micro-batch that is not finite; None: there is none.
        gradients: For each position and part, the parameters that have a gradient on some rank.
        buffers: For each position and part, the results for the buffers.
        nodes: The losses times their shares, added along the tree, as (first leaf, end, sum).
        losses: The index and the loss of each micro-batch that has one, if the ranks are few.
        metrics: For each metric the sum of the weights, and that of the values times weights.
        warnings: The first rank that has each sentence, and the warning.
        hooks: The merged values of the hooks, by their names.
    """

    leaves: int
    ranks: int
    batch: str | None
    failure: tuple[int, str, str] | None
    non_finite: NonFiniteLoss | None
    gradients: dict[str, list[str]]
    buffers: dict[str, list[BufferReport]]
    nodes: list[tuple[int, int, float]]
    losses: list[tuple[int, float]]
    metrics: dict[str, MetricSum]
    warnings: list[tuple[int, StepWarning]]
    hooks: dict[str, Any]

    def merge(self, other: StatusSummary, hooks: Mapping[str, StatusHook]) -> StatusSummary:
        """Return the summary of this range of ranks and the following one."""
        return StatusSummary(
            leaves=self.leaves,
            ranks=self.ranks,
            batch=self.batch if self.batch == other.batch else None,
            failure=_choose_failure(self.failure, other.failure),
            non_finite=min(filter(None, (self.non_finite, other.non_finite)), default=None),
            gradients=merge_by_name(self.gradients, other.gradients, _merge_masks),
            buffers=merge_by_name(self.buffers, other.buffers, _merge_buffers),
            nodes=_add_nodes(self.nodes, other.nodes, self.leaves),
            losses=self.losses + other.losses,
            metrics=merge_by_name(self.metrics, other.metrics, _add_metrics),
            warnings=self._merge_warnings(other),
            hooks={
                name: hooks[name].merge(value, other.hooks[name])
                for name, value in self.hooks.items()
            },
        )

    def _merge_warnings(self, other: StatusSummary) -> list[tuple[int, StepWarning]]:
        if not other.warnings:
            return self.warnings
        first: dict[str, tuple[int, StepWarning]] = {}
        for rank, warning in self.warnings + other.warnings:
            first.setdefault(warning.sentence, (rank, warning))
        return list(first.values())[: LISTED_WARNINGS if self.ranks > DETAILED_RANKS else None]

    # --- what the ranks conclude ---------------------------------------------------------------

    def list_losses(self) -> list[float | None]:
        """Return the loss of each micro-batch; None for one that has weight 0 or no known loss.

        Returns:
            The losses; empty if there are more than `DETAILED_RANKS` ranks.
        """
        if self.ranks > DETAILED_RANKS:
            return []
        losses: list[float | None] = [None] * self.leaves
        for leaf, loss in self.losses:
            losses[leaf] = loss
        return losses

    def sum_losses(self) -> float:
        """Return the loss of the batch.

        The losses of the micro-batches, times their shares, are added in float64 along the tree.
        Micro-batches that were not computed add 0. The sum is NaN if the loss of another one is
        not known.
        """
        known = {(lo, hi): value for lo, hi, value in self.nodes}
        if len(known) < self.leaves > sum([hi - lo for lo, hi in known]):
            missing = {*range(self.leaves)}.difference(*(range(*node) for node in known))
            known |= {(leaf, leaf + 1): 0.0 for leaf in missing}
        return total(known, self.leaves, add)

    def average_metrics(self) -> dict[str, float]:
        """Return each metric's mean over the micro-batches that reported it, by their weights.

        It is NaN if all weights are 0.
        """
        pairs = {name: map(round_sum, sums) for name, sums in self.metrics.items()}
        return {name: value / (weight or math.nan) for name, (weight, value) in pairs.items()}


def make_status(step: StepContext, parts: Sequence[Part], values: Mapping[str, Any]) -> RankStatus:
    """Return the status of this rank after its micro-batches, or with its failure.

    Args:
        step: The context of the step.
        parts: The gradients and buffers of each part of the model on this rank.
        values: The values of the hooks, by their names.
    """
    failure: tuple[str, str] | None = None
    if step.failure is not None:
        failure = step.failure.kind, step.failure.sentence
    if step.refusal:
        failure = "side_effect", step.refusal
    parallel = step.parallel
    batch = step.label.batch if parallel.replicas * parallel.stages > 1 else ""
    if failure is not None and step.is_stopped:
        return RankStatus(failure=failure, batch=batch, hooks=dict(values))
    results = [*map(_read_result, step.computed)]
    skipped = []
    assert step.batch is not None
    if results and len(results) < len(step.batch.microbatches):
        known = {result.leaf for result in results}
        skipped = [part.index for part in step.batch.microbatches if part.index not in known]
    reports = list[BufferReport]()
    masks = list[str]()
    for gradients, buffers in parts:
        reports.append(buffers.hash_results(is_alone=parallel.replicas == 1))
        masks.append(gradients.used_parameter_mask())
    return RankStatus(
        microbatches=results,
        skipped=skipped,
        buffers=reports,
        gradients=masks,
        warnings=step.warnings,
        failure=failure,
        batch=batch,
        hooks=dict(values),
    )


def _read_result(computed: ComputedMicrobatch) -> MicrobatchResult:
    """Return the results of a micro-batch as numbers; waits for the device."""
    microbatch = computed.microbatch
    given = computed.metrics
    loss = 0.0
    for part in computed.losses:
        loss += float(part)
    metrics = {}
    for name, value in given.items():
        value, weight = value if isinstance(value, tuple) else (value, microbatch.size)
        metrics[name] = float(value), float(weight)
    # A loop that calls loss.backward() by itself may have passed no loss on.
    known = loss if computed.losses else None
    return MicrobatchResult(microbatch.index, microbatch.size, computed.share, known, metrics)


def summarize(status: RankStatus, parallel: StepLayout, leaves: int) -> StatusSummary:
    """Return the summary of the status of this rank, for a batch of `leaves` micro-batches."""
    results = status.microbatches
    rank = parallel.rank
    position = str(parallel.position)
    ranks = parallel.replicas * parallel.stages
    losses = [(leaf, loss) for leaf, _, _, loss, _ in results if loss is not None]
    lost = [NonFiniteLoss(leaf, rank, loss) for leaf, loss in losses if not math.isfinite(loss)]
    terms = [
        (leaf, leaf + 1, math.nan if loss is None else loss * share)
        for leaf, _, share, loss, _ in results
    ]
    terms += [(leaf, leaf + 1, 0.0) for leaf in status.skipped]
    warnings = {warning.sentence: (rank, warning) for warning in reversed(status.warnings)}
    return StatusSummary(
        leaves=leaves,
        ranks=ranks,
        batch=status.batch,
        failure=None if status.failure is None else (rank, *status.failure),
        non_finite=min(lost, default=None),
        gradients={position: status.gradients},
        buffers={
            position: [
                report.of_replica(parallel.replica) if report.hashes else report
                for report in status.buffers
            ]
        },
        nodes=terms if ranks == 1 else _add_nodes((), terms, leaves),
        losses=losses if ranks <= DETAILED_RANKS else [],
        metrics=_sum_metrics([result for result in results if result.metrics]),
        warnings=list(reversed(warnings.values())),
        hooks=status.hooks,
    )


def merge_by_name(
    left: Mapping[str, Any], right: Mapping[str, Any], merge: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    """Return the values of two mappings; `merge` combines those that both have."""
    merged = dict(left)
    for name, value in right.items():
        merged[name] = merge(merged[name], value) if name in merged else value
    return merged


def _choose_failure(*failures: tuple[int, str, str] | None) -> tuple[int, str, str] | None:
    """Return the first side effect, which may be why a stage stopped, or else the first failure."""
    known = filter(None, failures)
    return min(known, key=lambda failure: failure[1] != "side_effect", default=None)


def _merge_masks(left: list[str], right: list[str]) -> list[str]:
    if left == right:
        return left
    # A rank that stops the step reports no parts, and nothing is reduced.
    return [f"{int(one, 16) | int(two, 16):x}" for one, two in zip(left, right, strict=False)]


def _merge_buffers(left: list[BufferReport], right: list[BufferReport]) -> list[BufferReport]:
    return [merge_reports(one, two) for one, two in zip(left, right, strict=False)]


def _add_metrics(left: MetricSum, right: MetricSum) -> MetricSum:
    return merge_partial_sums(left[0], right[0]), merge_partial_sums(left[1], right[1])


def _sum_metrics(results: Sequence[MicrobatchResult]) -> dict[str, MetricSum]:
    sums = {}
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        pairs = [result.metrics[name] for result in results if name in result.metrics]
        weights = compute_partial_sums(weight for _, weight in pairs)
        sums[name] = weights, compute_partial_sums(value * weight for value, weight in pairs)
    return sums


def _add_nodes(
    known: Iterable[tuple[int, int, float]], more: Iterable[tuple[int, int, float]], leaves: int
) -> list[tuple[int, int, float]]:
    """Add nodes of the tree to nodes that are known, as far as siblings are."""
    fold: TreeAccumulator[float] = TreeAccumulator(leaves, add)
    fold.nodes = {(lo, hi): value for lo, hi, value in known}
    for lo, hi, value in more:
        fold.put((lo, hi), value)
    return [(*node, fold.nodes[node]) for node in sorted(fold.nodes)]
