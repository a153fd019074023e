"""Schedules: the order in which each rank of a pipeline executes its actions.

    1f1b, 3 ranks, 4 micro-batches; a backward (') takes twice as long as a forward

    rank 0   0  1  2  .  .  .  .  0' 0' 3  1' 1' .  2' 2' .  3' 3'      time ->
    rank 1   .  0  1  .  .  0' 0' 2  1' 1' 3  2' 2' .  3' 3' .  .
    rank 2   .  .  0  0' 0' 1  1' 1' 2  2' 2' 3  3' 3' .  .  .  .

A schedule is plain data: a tuple of actions for each rank. Stage s is on rank s % ranks; only
"interleaved" has several stages per rank. In every schedule, each stage computes gradients in
the order of the micro-batches.

Symbols: p ranks, m micro-batches, v stages per rank; r a rank, s a stage, j a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lockstep.kernel.errors import LayoutError

__all__ = [
    "NAMES",
    "Action",
    "Kind",
    "Product",
    "Schedule",
    "build_schedule",
    "count_stages",
    "get_dependencies",
    "get_product",
    "gpipe",
    "interleaved",
    "iterate_in_order",
    "one_f_one_b",
    "zero_bubble",
]

Kind = Literal["forward", "backward", "input", "weight"]
"""The kind of an action. "backward" is a whole backward; "input" and "weight" are its two parts,
which compute the gradients of the inputs and of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation for a micro-batch on a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Return the name of the action, for messages."""
        words = {"input": "input gradient", "weight": "weight gradient"}
        return f"{words.get(self.kind, self.kind)} of micro-batch {self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order."""

Product = tuple[Literal["output", "gradient"], int, int]
"""A result that other actions wait for: the output of a stage, or the gradient of its input."""

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def build_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Return the schedule called `name`, one of NAMES.

    Args:
        name: The name of the schedule.
        ranks: Ranks per replica.
        microbatches: Micro-batches per step of one replica.
        stages_per_rank: Stages per rank, for "interleaved" only; None for its default, 2.

    Raises:
        LayoutError: The name is unknown, a number is below 1, or `stages_per_rank` is above 1 for
            another schedule.
    """
    if name not in NAMES:
        raise LayoutError(f"there is no schedule {name!r}; choose from {', '.join(NAMES)}")
    if name == "interleaved":
        return interleaved(ranks, microbatches, 2 if stages_per_rank is None else stages_per_rank)
    if stages_per_rank not in (None, 1):
        raise LayoutError(
            f"stages_per_rank={stages_per_rank}: only the schedule interleaved has several stages "
            f"per rank, not {name}"
        )
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero-bubble": zero_bubble}
    return makers[name](ranks, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards.

    The bubble is (p-1)/(m+p-1). Every rank holds the activations of all m micro-batches.
    Huang et al., "GPipe", 2019.
    """
    _check(ranks, microbatches)
    return tuple(
        _all("forward", rank, microbatches) + _all("backward", rank, microbatches)
        for rank in range(ranks)
    )


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B: after its warm-up, a rank alternates between one forward and one backward.

    The bubble is (p-1)/(m+p-1), as in GPipe, but rank r holds the activations of at most p - r
    micro-batches. Narayanan et al., "PipeDream-2BW", 2021.
    """
    _check(ranks, microbatches)
    return tuple(
        _alternating(
            _all("forward", rank, microbatches),
            _all("backward", rank, microbatches),
            ahead=ranks - 1 - rank,
        )
        for rank in range(ranks)
    )


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return interleaved 1F1B: each rank has `stages_per_rank` stages, every `ranks`-th one.

    Micro-batches pass through a rank's stages in groups of p to 2p - 1, as evenly sized as
    possible, so m need not be a multiple of p. For m >= p the bubble is (p-1)/(vm+p-1).
    Interleaving needs more transfers and more memory for activations than 1F1B. Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters", 2021.
    """
    _check(ranks, microbatches)
    if stages_per_rank < 1:
        raise LayoutError(f"stages_per_rank={stages_per_rank}: a rank has at least one stage")
    rounds = max(1, microbatches // ranks)
    bounds = [-(-microbatches * turn // rounds) for turn in range(rounds + 1)]  # larger first
    groups = [range(lo, hi) for lo, hi in pairwise(bounds)]
    result = []
    for rank in range(ranks):
        own = range(rank, ranks * stages_per_rank, ranks)
        forwards = [Action("forward", s, j) for group in groups for s in own for j in group]
        backwards = [
            Action("backward", s, j) for group in groups for s in reversed(own) for j in group
        ]
        ahead = 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * len(groups[0])
        result.append(_alternating(forwards, backwards, ahead))
    return tuple(result)


def zero_bubble(ranks: int, microbatches: int) -> Schedule:
    """Return a zero-bubble schedule (ZB-H1): delayed weight gradients fill the bubble.

    It is 1F1B with the backward split in two. The gradient of the input, for which the previous
    rank waits, is computed at once; rank r computes the gradients of the weights r micro-batches
    later. If each part takes as long as a forward, the bubble is (p-1)/(3m+p-1), about a third of
    1F1B's. A rank holds at most p micro-batches, as in 1F1B. Stage 0 sends no gradient, so its
    backward stays whole. Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
    """
    _check(ranks, microbatches)
    first = one_f_one_b(ranks, microbatches)[:1]
    return first + tuple(_delayed(rank, ranks, microbatches) for rank in range(1, ranks))


def _delayed(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Return a rank's 1F1B actions, with its weight gradients `rank` micro-batches late."""
    inputs = _all("input", rank, microbatches)
    weights = _all("weight", rank, microbatches)
    result: list[Action] = []
    for action in _alternating(_all("forward", rank, microbatches), inputs, ranks - 1 - rank):
        result.append(action)
        if action.kind == "input" and action.microbatch >= rank:
            result.append(weights[action.microbatch - rank])
    return (*result, *weights[max(0, microbatches - rank) :])


def _all(kind: Kind, stage: int, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(kind, stage, j) for j in range(microbatches))


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """Return `ahead` forwards, then one of each in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    result = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        result += (forward, backward)
    return (*result, *backwards[len(forwards) - ahead :])


def get_product(action: Action) -> Product | None:
    """Return the product of an action; None for the gradients of weights, which stay local."""
    if action.kind == "weight":
        return None
    what: Literal["output", "gradient"] = "output" if action.kind == "forward" else "gradient"
    return (what, action.stage, action.microbatch)


def get_dependencies(action: Action, stages: int) -> list[Product]:
    """Return the products that an action needs in a model with `stages` stages."""
    s = action.stage
    j = action.microbatch
    if action.kind == "forward":
        return [("output", s - 1, j)] if s > 0 else []
    if action.kind == "weight":
        return [("gradient", s, j)]
    own: Product = ("output", s, j)
    return [own, ("gradient", s + 1, j)] if s < stages - 1 else [own]


def count_stages(schedule: Schedule) -> int:
    """Return the number of stages of a schedule."""
    return 1 + max((action.stage for actions in schedule for action in actions), default=-1)


def iterate_in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) in an order that satisfies all dependencies.

    Raises:
        LayoutError: The schedule deadlocks.
    """
    stages = count_stages(schedule)
    ready: set[Product | None] = set()
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and ready.issuperset(
                get_dependencies(actions[at[rank]], stages)
            ):
                ready.add(get_product(actions[at[rank]]))
                yield rank, actions[at[rank]]
                at[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule):
        if at[rank] < len(actions):
            stuck = actions[at[rank]]
            raise LayoutError(
                f"the schedule deadlocks: rank {rank} waits at its action {at[rank]}, the {stuck} "
                f"on stage {stuck.stage}, for a result that is computed later or never"
            )


def _check(ranks: int, microbatches: int) -> None:
    if ranks < 1 or microbatches < 1:
        raise LayoutError(
            f"a schedule needs at least one rank and one micro-batch, not {ranks} and "
            f"{microbatches}"
        )
