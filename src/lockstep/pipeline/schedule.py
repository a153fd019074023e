"""The schedule: the order in which each rank of a pipeline executes its actions, 1F1B.

    3 ranks, 4 micro-batches; a backward (') takes twice as long as a forward

    rank 0   0  1  2  .  .  .  .  0' 0' 3  1' 1' .  2' 2' .  3' 3'      time ->
    rank 1   .  0  1  .  .  0' 0' 2  1' 1' 3  2' 2' .  3' 3' .  .
    rank 2   .  .  0  0' 0' 1  1' 1' 2  2' 2' 3  3' 3' .  .  .  .

After its warm-up, a rank alternates between one forward and one backward. The bubble, the share of
time in which ranks are idle, is (p - 1) / (m + p - 1) for p ranks and m micro-batches. Rank r holds
the activations of at most p - r micro-batches. Every rank computes gradients in the order of the
micro-batches. Narayanan et al., "PipeDream-2BW", 2021, where the schedule is called
PipeDream-Flush.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lockstep.kernel.errors import LayoutError

__all__ = ["Action", "Kind", "SimulatedAction", "order_actions", "simulate"]

Kind = Literal["forward", "backward"]

DURATION = {"forward": 1.0, "backward": 2.0}
"""The durations in a simulation."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation for a micro-batch on a stage."""

    kind: Kind
    microbatch: int


@lru_cache(maxsize=64)
def order_actions(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """Return the actions of the rank that holds `stage`, in order.

    Raises:
        LayoutError: A number is below 1.
    """
    if stages < 1 or microbatches < 1:
        raise LayoutError(
            f"a schedule needs at least one rank and one micro-batch, not {stages} and "
            f"{microbatches}"
        )
    forwards = [Action("forward", number) for number in range(microbatches)]
    backwards = [Action("backward", number) for number in range(microbatches)]
    ahead = min(stages - 1 - stage, microbatches)
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[microbatches - ahead :])


@dataclass(frozen=True, slots=True)
class SimulatedAction:
    """An action with its times, in units of one forward."""

    rank: int
    action: Action
    begin: float
    end: float


def simulate(stages: int, microbatches: int) -> list[SimulatedAction]:
    """Simulate a step, in which a backward takes twice as long as a forward.

    An action starts when its rank is idle and its inputs are there. Transfers take no time.

    Returns:
        The actions of rank 0 in order, then those of rank 1, and so on.

    Raises:
        LayoutError: A number is below 1.
    """
    waiting = [[*order_actions(stage, stages, microbatches)] for stage in range(max(1, stages))]
    free = [0.0] * stages
    ends: dict[tuple[Kind, int, int], float] = {}
    spans: list[SimulatedAction] = []
    while any(waiting):
        for stage, actions in enumerate(waiting):
            while actions:
                kind, index = actions[0].kind, actions[0].microbatch
                source = stage - 1 if kind == "forward" else stage + 1
                is_end = source in (-1, stages)
                if not is_end and (kind, source, index) not in ends:
                    break
                begin = free[stage] if is_end else max(free[stage], ends[kind, source, index])
                free[stage] = ends[kind, stage, index] = begin + DURATION[kind]
                spans.append(SimulatedAction(stage, actions.pop(0), begin, free[stage]))
    return sorted(spans, key=lambda span: span.rank)
