"""The cut: a batch in M micro-batches, the micro-batches over the replicas.

    batch of B = 11 samples, M = 4      0 1 2 | 3 4 5 | 6 7 8 | 9 10
    three replicas                      replica 0     | replica 1 | replica 2
                                        m = 0, 1      | m = 2     | m = 3

Both cuts follow one rule: contiguous, sizes that differ by at most one, the
larger first. A batch of fewer than M samples has fewer micro-batches, never an
empty one. Nothing here knows of processes; plain values in, plain values out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Batch", "Microbatch", "leaves", "owned", "spans"]


def spans(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` contiguous ranges, the larger first.

    Sizes differ by at most one; with `total < parts` the last ranges are empty.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cannot cut {total} things into {parts} parts")
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(starts)]


def leaves(samples: int, microbatches: int) -> int:
    """Return how many micro-batches of a batch hold a sample: the leaves of its tree."""
    return min(samples, microbatches)


def owned(samples: int, microbatches: int, replicas: int, replica: int) -> range:
    """Return the micro-batches of a batch of `samples` that `replica` computes."""
    return spans(leaves(samples, microbatches), replicas)[replica]


@dataclass(frozen=True)
class Microbatch:
    """One micro-batch: leaf `index` of the batch's tree, with `size` samples."""

    index: int
    size: int
    data: Any


@dataclass(frozen=True)
class Batch:
    """A global batch of `size` samples as one rank sees it.

    `microbatches` holds those that this rank's replica computes, in ascending
    order; `leaves` counts all of the batch. `seconds` is how long this rank
    waited for its data.
    """

    size: int
    leaves: int
    microbatches: tuple[Microbatch, ...]
    epoch: int = 0
    seconds: float = 0.0
