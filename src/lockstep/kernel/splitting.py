"""Rule 1, splitting: a batch into M micro-batches, and these over the replicas.

    batch of B = 11 samples, M = 4      0 1 2 | 3 4 5 | 6 7 8 | 9 10
    three replicas                      replica 0     | replica 1 | replica 2
                                        m = 0, 1      | m = 2     | m = 3

Both splits follow the same rule: parts are contiguous, their sizes differ by at most one, and
larger parts come first. A batch of fewer than M samples has fewer micro-batches, none of which is
empty. M is part of the contract and never depends on the number of ranks, so neither do the
micro-batches: ranks only divide them among themselves (`lockstep.data.assignment`). Which replica
computes a micro-batch changes no bit.
"""

from __future__ import annotations

from itertools import pairwise

__all__ = ["count_microbatches", "split_evenly"]


def split_evenly(total: int, parts: int) -> list[range]:
    """Split `range(total)` into `parts` contiguous ranges, the larger ones first.

    Sizes differ by at most one; with `total < parts` the last ranges are empty.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cannot split {total} items into {parts} parts")
    small, larger = divmod(total, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(starts)]


def count_microbatches(samples: int, microbatches: int) -> int:
    """Return the number of non-empty micro-batches of a batch: the leaves of its tree."""
    return min(samples, microbatches)
