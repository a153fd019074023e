"""Groups: neighboring micro-batches that each stage computes between the actions of others.

    one by one    rank 0   0  1  .  0' 2  1' 3  2' 4 ...
    groups of 2   rank 0   01 23 .  0'1' 45 2'3' ...

The schedule of a step is that of groups, in which a group takes the place of a micro-batch. So a
stage may compute a group in one pass, or its micro-batches one by one: their messages are the same,
and the order in which stages wait for each other is that of a schedule without a deadlock in both
cases. The size of the groups changes no bit. The first rank of a replica chooses it for each step
(`GroupSizeTuner`), and every message to a later stage carries it.

Larger groups take fewer passes, but the stages begin later and end earlier, and hold the
activations of more micro-batches. So several sizes are timed, and those that take too much memory
are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.pipeline.p2p import GroupSize
from lockstep.pipeline.schedules import Action

__all__ = [
    "SIZES",
    "GroupSizeTuner",
    "count_in_flight",
    "divide_into_groups",
    "find_schedule",
    "is_node",
]

SIZES = (2, 4, 8)
"""The sizes of groups that are timed beside single micro-batches."""

ROUNDS = 4
"""The number of steps for which each size is timed."""

TOLERANCE = 0.02
"""The share of the time of single micro-batches that a group has to save."""

MOST_KINDS = 8
"""The number of kinds of batches, by micro-batches and samples, for which sizes are timed."""


def divide_into_groups(indices: Sequence[int], size: int) -> list[range]:
    """Return the positions of the micro-batches of each group.

    A group is a node of the tree: its first index is a multiple of its length, a power of two.

    Args:
        indices: The indices of the micro-batches, in order.
        size: The largest number of micro-batches of a group, a power of two.
    """
    groups: list[range] = []
    at = 0
    while at < len(indices):
        length = size
        while length > 1 and not is_node(indices[at : at + length], length):
            length //= 2
        groups.append(range(at, at + length))
        at += length
    return groups


def is_node(indices: Sequence[int], length: int) -> bool:
    """Return whether indices are all the leaves of a node with this number of leaves."""
    first = indices[0]
    return first % length == 0 and [*indices] == [*range(first, first + length)]


def find_schedule(name: str, size: int) -> str:
    """Return the name of the schedule of groups.

    A pass over several micro-batches has a whole backward, and a schedule that postpones weight
    gradients is 1F1B without that.
    """
    return "1f1b" if name == "zero-bubble" and size > 1 else name


def count_in_flight(actions: Sequence[Action], stage: int) -> int:
    """Return the largest number of groups between their forward and backward on a stage."""
    most = now = 0
    for action in actions:
        if action.stage == stage and action.kind == "forward":
            now += 1
            most = max(most, now)
        elif action.stage == stage and action.kind in ("backward", "weight"):
            now -= 1
    return most


class GroupSizeTuner:
    """Chooses the size of groups by the time that a step takes on the first rank.

    Attributes:
        limits: What the stages have reported: the largest size for which they have memory, and the
            largest that one of them computes in one pass.
        fixed: The group size to use instead of the fastest one. If the limits do not allow it,
            micro-batches are computed one by one. Default: None.
    """

    def __init__(self) -> None:
        self.limits = GroupSize()
        self.fixed: int | None = None
        self._times: dict[tuple[int, int], dict[int, list[float]]] = {}

    def choose(self, microbatches: int, samples: int) -> int:
        """Return the size for a step with these numbers of micro-batches and samples."""
        kind = microbatches, samples
        most = min(*self.limits, microbatches // 2)
        sizes = [size for size in SIZES if size <= most]
        if self.fixed is not None:
            return self.fixed if self.fixed in sizes else 1
        if not sizes or (kind not in self._times and len(self._times) == MOST_KINDS):
            return 1
        times = self._times.setdefault(kind, {})
        counts = {size: len(times.get(size, ())) for size in (1, *sizes)}
        fewest = min(counts, key=counts.__getitem__)
        if counts[fewest] < ROUNDS:
            return fewest
        best = min(sizes, key=lambda size: min(times[size]))
        return best if min(times[best]) < min(times[1]) * (1 - TOLERANCE) else 1

    def note(self, microbatches: int, samples: int, size: int, seconds: float) -> None:
        """Keep the time of a step, as long as sizes are compared."""
        times = self._times.get((microbatches, samples))
        if times is not None and len(times.setdefault(size, [])) < ROUNDS:
            times[size].append(seconds)
