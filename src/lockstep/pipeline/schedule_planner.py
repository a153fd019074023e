"""The schedule planner: finds the fastest partition and schedule for measured blocks.

The best partition is the one whose slowest stage is fastest:

    blocks        3   1   4   1   5        boundaries between them   1  9  1  1
    two stages  [ 3   1   4 ] [ 1   5 ]    8 + 1 and 6 + 1: the slowest takes 9

The cost of a stage is the sum of its blocks plus the boundaries on both of its sides, because
a transfer keeps both neighbors busy. Dynamic programming finds the optimum. Among partitions whose
slowest stage is equally fast, it prefers the more even one, with the smaller sum of squared costs.

The best schedule is found by simulation. This module does not import torch: the command
`lockstep schedule` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedules import Schedule, build_schedule
from lockstep.pipeline.simulation import Costs, Simulation, group_costs, simulate

__all__ = [
    "SchedulePlan",
    "choose_schedule",
    "make_ranges",
    "partition_blocks",
    "plan_all_schedules",
    "plan_schedule",
]

CostedPartition = tuple[float, float, tuple[int, ...]]
"""A partition: the cost of its slowest stage, the sum of the squared costs, the stops."""

TOLERANCE = 0.01
"""The share of 1F1B's time by which another schedule must be faster to be preferred."""


@dataclass(frozen=True)
class SchedulePlan:
    """A planned pipeline.

    Attributes:
        name: The name of the schedule.
        stages_per_rank: The number of stages per rank.
        ranges: The range of blocks of each stage, in model order.
        schedule: The actions of each rank.
        simulation: The simulation of the schedule.
    """

    name: str
    stages_per_rank: int
    ranges: tuple[range, ...]
    schedule: Schedule
    simulation: Simulation


def plan_schedule(
    name: str,
    costs: Costs,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
) -> SchedulePlan:
    """Partition blocks into the stages of a schedule, and simulate it.

    Args:
        name: The name of the schedule.
        costs: The costs of the blocks.
        ranks: Ranks per replica.
        microbatches: Micro-batches per step.
        stages_per_rank: Stages per rank, for "interleaved"; None for 2.

    Raises:
        LayoutError: There are fewer blocks than stages.
    """
    schedule = build_schedule(name, ranks, microbatches, stages_per_rank)
    stages_per_rank = (
        (2 if stages_per_rank is None else stages_per_rank) if name == "interleaved" else 1
    )
    # Each boundary is crossed twice: by the activation and by its gradient.
    transfers = [2 * time for time in costs.transfer]
    ranges = partition_blocks(costs.totals, transfers, ranks * stages_per_rank)
    simulation = simulate(schedule, group_costs(costs, ranges))
    return SchedulePlan(name, stages_per_rank, tuple(ranges), schedule, simulation)


def plan_all_schedules(costs: Costs, ranks: int, microbatches: int) -> Iterator[SchedulePlan]:
    """Plan every schedule for which there are enough blocks, 1F1B first."""
    for name in ("1f1b", "zero-bubble", "gpipe", "interleaved"):
        stages_per_rank = 2 if name == "interleaved" else 1
        if name == "1f1b" or ranks * stages_per_rank <= len(costs.forward):
            yield plan_schedule(name, costs, ranks, microbatches, stages_per_rank)


def choose_schedule(costs: Costs, ranks: int, microbatches: int) -> SchedulePlan:
    """Return the fastest plan by simulation; 1F1B unless another one is 1 % faster.

    Args:
        costs: The costs of the blocks.
        ranks: Ranks per replica.
        microbatches: Micro-batches per step.

    Raises:
        LayoutError: There are fewer blocks than ranks.
    """
    plans = list(plan_all_schedules(costs, ranks, microbatches))
    fastest = min(plans, key=lambda plan: plan.simulation.makespan)
    is_close = plans[0].simulation.makespan * (1 - TOLERANCE) <= fastest.simulation.makespan
    return plans[0] if is_close else fastest


# --- the best partition -----------------------------------------------------------------------


def partition_blocks(
    blocks: Sequence[float], boundaries: Sequence[float], stages: int
) -> list[range]:
    """Partition blocks into contiguous, non-empty stages; takes O(len(blocks)^2 * stages).

    Args:
        blocks: The cost of each block.
        boundaries: The cost of each transfer between the blocks b and b + 1, which counts for the
            stages on both sides; an empty sequence means zeros.
        stages: The number of stages.

    Raises:
        LayoutError: There are fewer blocks than stages.
    """
    if stages > len(blocks):
        raise LayoutError(
            f"{len(blocks)} blocks cannot be split into {stages} stages: each stage needs at least "
            "one block"
        )
    sums = [0.0, *accumulate(blocks)]
    crossing = [0.0, *(boundaries or [0.0] * (len(blocks) - 1)), 0.0]

    def add_stage(part: CostedPartition, hi: int) -> CostedPartition:
        slowest, squares, stops = part
        lo = stops[-1] if stops else 0
        cost = sums[hi] - sums[lo] + crossing[lo] + crossing[hi]
        return max(slowest, cost), squares + cost**2, (*stops, hi)

    best: dict[int, CostedPartition] = {0: (0.0, 0.0, ())}  # of the first `hi` blocks, by `hi`
    for _ in range(stages):
        best = {
            hi: min(add_stage(part, hi) for lo, part in best.items() if lo < hi)
            for hi in range(min(best) + 1, len(blocks) + 1)
        }
    stops = best[len(blocks)][-1]
    return make_ranges([hi - lo for lo, hi in pairwise((0, *stops))])


def make_ranges(sizes: Sequence[int]) -> list[range]:
    """Return the contiguous ranges with the given sizes."""
    stops = accumulate(sizes)
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
