"""Results of a step that the ranks of an elastic run keep when one of them is lost.

    rank 0 has computed    0 1 | 2 3 |     |        leaves of the tree
    rank 1, lost                     | 4 5 |
    rank 2                                 | 6 7
    rank 0, afterwards     . .   . .   4            only what is missing is computed
    rank 2                               5   . .

The sums of the survivors stay valid: the tree does not depend on which rank computes the rest.
Each rank then holds the largest nodes whose leaves it has computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.data.assignment import ReplicaShare
from lockstep.kernel.buffers import Buffers
from lockstep.kernel.splitting import count_microbatches, split_evenly
from lockstep.kernel.step_context import StepContext
from lockstep.kernel.tree import Node, TreeAccumulator

__all__ = ["KeptWork", "LeavesShare", "RestOfStep", "agree_on_rest", "assign_rest", "hold_nodes"]


def assign_rest(computed: Sequence[Sequence[int]], leaves: int) -> list[list[int]]:
    """Divide the leaves that nobody has computed evenly among the ranks.

    Args:
        computed: The leaves that each rank has computed.
        leaves: The number of leaves of the tree.

    Returns:
        The leaves that each rank has to compute, ascending.
    """
    known = {leaf for own in computed for leaf in own}
    missing = [leaf for leaf in range(leaves) if leaf not in known]
    cuts = split_evenly(len(missing), len(computed))
    return [missing[cut.start : cut.stop] for cut in cuts]


def hold_nodes(held: Sequence[int], leaves: int) -> list[Node]:
    """Return the largest nodes whose leaves are all held, ascending."""
    accumulator: TreeAccumulator[None] = TreeAccumulator(leaves, lambda left, right: None)
    for leaf in held:
        accumulator.put((leaf, leaf + 1), None)
    return sorted(accumulator.nodes)


@dataclass(frozen=True)
class LeavesShare(ReplicaShare):
    """The share of a batch that consists of some leaves.

    Attributes:
        leaves: The leaves.
    """

    leaves: tuple[int, ...] = ()

    @lru_cache(maxsize=64)  # noqa: B019 - shares are few
    def pieces(self, samples: int) -> tuple[tuple[int, range], ...]:
        """Return the index and the positions of each micro-batch in a batch of `samples`."""
        cuts = split_evenly(samples, count_microbatches(samples, self.microbatches))
        return tuple((leaf, cuts[leaf]) for leaf in self.leaves)


@dataclass
class KeptWork:
    """The results of this rank in a step.

    Attributes:
        step: The step, with the results of its micro-batches.
        sums: The sums of the gradients of this rank's nodes.
        buffers: The buffers, with the results of the micro-batches.
    """

    step: StepContext
    sums: Any
    buffers: Buffers

    @property
    def leaves(self) -> list[int]:
        """The micro-batches that were computed, or left out because their weight is 0."""
        return sorted(leaf for low, high in self.sums.complete for leaf in range(low, high))


@dataclass(frozen=True)
class RestOfStep:
    """The rest of a step, as the survivors have agreed.

    Attributes:
        leaves: The micro-batches that this rank has to compute.
        nodes_by_rank: The nodes that each rank holds at the end.
        shares: The shares of all micro-batches in the loss.
        samples: The number of samples of these.
    """

    leaves: tuple[int, ...]
    nodes_by_rank: tuple[tuple[Node, ...], ...]
    shares: dict[int, float]
    samples: int


def agree_on_rest(kept: KeptWork | None, step: StepContext) -> RestOfStep | None:
    """Agree with the other ranks of a round on who computes what is missing; a collective call.

    Args:
        kept: What this rank has computed; None if it has not begun the step.
        step: The context of the new attempt.

    Returns:
        What is left; None if no rank has begun the step.
    """
    mine: Any = None
    if kept is not None and kept.step.batch is not None:
        before = kept.step
        leaves = kept.step.batch.leaves
        mine = [kept.leaves, leaves, [*before.shares.items()], before.samples]
    about = f"dividing what is left of step {step.number}"
    messages = step.parallel.messages.gather(json.dumps(mine).encode(), about)
    everyone = [json.loads(message) for message in messages]
    begun = next(filter(None, everyone), None)
    if begun is None:
        return None
    _, leaves, shares, samples = begun
    computed = [said[0] if said else [] for said in everyone]
    rest = assign_rest(computed, leaves)
    nodes = [hold_nodes([*own, *more], leaves) for own, more in zip(computed, rest, strict=True)]
    return RestOfStep(
        tuple(rest[step.parallel.replica]), tuple(map(tuple, nodes)), dict(shares), samples
    )
