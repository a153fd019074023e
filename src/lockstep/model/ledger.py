"""The ledger: what the ranks tell each other once a step, in one small message.

Each rank sends a page about the micro-batches that it computed; every rank then
holds all pages, and draws the same conclusions from them: the loss, whether it
is a number, the metrics, which buffers to merge. Pages are JSON: floats keep
every bit, and nothing is unpickled.
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

from lockstep.comm.transfer import all_gather_bytes
from lockstep.comm.tree import total
from lockstep.model.buffers import Finding

__all__ = ["Entry", "Page", "exchange", "mean_metrics", "not_finite", "peak_memory", "total_loss"]


@dataclass(frozen=True)
class Entry:
    """One micro-batch: its part of the batch, its loss (not scaled) and its metrics."""

    leaf: int
    size: int
    share: float
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """What one rank says of its part of a step; times in seconds, peak memory in bytes."""

    entries: list[Entry]
    buffers: list[list[Finding]]
    """Of each part of the model that is here: the whole one, or its stages."""
    compute: float
    data: float
    memory: int = 0
    gradients: list[str] = field(default_factory=list)
    """The parameters of each part that have a gradient here, as the bits of a hex number."""
    warnings: list[str] = field(default_factory=list)
    failure: str = ""
    """What went wrong here that stops the step on every rank."""
    side_effect: str = ""
    """What the step wrote here that no rank may write: it stops the step on every rank."""
    weights: str = ""
    """A hash of this rank's parameters and buffers before the step, where it was checked."""
    settings: str = ""
    """A hash of the settings that this rank takes the step with; see `live_settings`."""
    stopped: str = ""
    """Why a stage here could not go on, with its place."""
    idle: float = 0.0
    """Seconds that a stage waited for its neighbours; not part of `compute`."""
    spans: list[list[Any]] = field(default_factory=list)
    """When this rank worked on what, as the record has it, where the step is recorded."""
    begun: float = 0.0
    """When the step began here, by rank 0's clock; only with `spans`."""
    batch: str = ""
    """Which batch this rank trained on; see `lockstep.data.consistency`."""


def exchange(
    page: Page, about: str, group: dist.ProcessGroup | None = None, remark: str = ""
) -> list[Page]:
    """Return every rank's page, in rank order; `about` and `remark` as of `all_gather_bytes`."""
    message = json.dumps(vars(page), default=vars).encode()
    return [_read(message) for message in all_gather_bytes(message, about, group, remark)]


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _read(message: bytes) -> Page:
    content = json.loads(message)
    content["entries"] = [Entry(**entry) for entry in content["entries"]]
    return Page(**content)


def _entries(pages: Iterable[Page]) -> list[Entry]:
    return sorted((entry for page in pages for entry in page.entries), key=lambda each: each.leaf)


def not_finite(pages: Sequence[Page]) -> tuple[int, Entry] | None:
    """Return (rank, entry) of the first micro-batch whose loss is NaN or infinite, if any."""
    bad = [
        (entry.leaf, rank, entry)
        for rank, page in enumerate(pages)
        for entry in page.entries
        if not math.isfinite(entry.loss)
    ]
    return min(bad)[1:] if bad else None


def total_loss(pages: Iterable[Page], leaves: int) -> float:
    """Return the batch's loss: each micro-batch's by its share, added in float64 along the tree."""
    terms = dict.fromkeys(((leaf, leaf + 1) for leaf in range(leaves)), 0.0)
    for entry in _entries(pages):
        terms[entry.leaf, entry.leaf + 1] = entry.loss * entry.share
    return total(terms, leaves, add)


def mean_metrics(pages: Iterable[Page]) -> dict[str, float]:
    """Return each metric's mean over the samples of the micro-batches that gave it."""
    entries = _entries(pages)
    names = dict.fromkeys(name for entry in entries for name in entry.metrics)
    return {
        name: math.fsum(
            entry.metrics[name] * entry.size for entry in entries if name in entry.metrics
        )
        / sum(entry.size for entry in entries if name in entry.metrics)
        for name in names
    }
