"""Simulation of pipeline schedules: the duration and the memory of a step.

Each rank executes its actions in order. An action starts when its rank is idle and its inputs
have arrived. A transfer takes time but keeps no rank busy.

    rank 0   F0  F1  ..waits..  B0  B1        bubble = idle / (ranks * makespan)
    rank 1   ..  F0  B0  F1  B1  ........
             0   1   2              makespan

The same costs determine the partition of a model and the choice of a schedule, so they are kept
per piece. A piece is a block of the model, or a stage, which is a group of blocks.

The costs may be the median times of a recorded step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedules import (
    Action,
    Product,
    Schedule,
    count_stages,
    get_dependencies,
    get_product,
    iterate_in_order,
)

__all__ = [
    "Costs",
    "SimulatedAction",
    "Simulation",
    "group_costs",
    "simulate",
]


@dataclass(frozen=True)
class Costs:
    """The costs of one micro-batch on each piece of a model.

    Attributes:
        forward: The time of the forward of each piece, in any unit.
        input: The time of the part of the backward that computes the gradients of inputs.
        weight: The time of the part that computes the gradients of weights.
        transfer: The time to transfer an activation, and later its gradient, across each
            boundary between pieces; zeros by default.
        backward: The time of a whole backward; by default the sum of its parts.
        held: The memory that a forward keeps until the backward, in any unit; 1 per piece by
            default.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    held: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the defaults."""
        pieces = len(self.forward)
        parts = zip(self.input, self.weight, strict=False)
        defaults = {
            "transfer": (0.0,) * (pieces - 1),
            "backward": tuple(inputs + weights for inputs, weights in parts),
            "held": (1.0,) * pieces,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)

    @classmethod
    def unit(cls, ranks: int, stages_per_rank: int = 1) -> Costs:
        """Return unit costs, for comparing schedules.

        The part of the model on each rank takes 1 for forward, 2 for backward (half of it for the
        weights), and holds 1. It is divided evenly into `stages_per_rank` stages.
        """
        piece = (1 / stages_per_rank,) * (ranks * stages_per_rank)
        return cls(piece, piece, piece, held=piece)

    def get_duration(self, action: Action) -> float:
        """Return the time that an action takes."""
        times: tuple[float, ...] = getattr(self, action.kind)
        return times[action.stage]

    @property
    def totals(self) -> tuple[float, ...]:
        """The time of each piece, forward and backward together."""
        return tuple(map(sum, zip(self.forward, self.backward, strict=True)))


def group_costs(costs: Costs, ranges: Sequence[range]) -> Costs:
    """Return the costs of stages, each a contiguous range of pieces."""

    def add(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(math.fsum(values[piece] for piece in stage) for stage in ranges)

    return Costs(
        add(costs.forward),
        add(costs.input),
        add(costs.weight),
        tuple(costs.transfer[stage.stop - 1] for stage in ranges[:-1]),
        add(costs.backward),
        add(costs.held),
    )


@dataclass(frozen=True, slots=True)
class SimulatedAction:
    """An action with its times."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        spans: The actions with their times: those of rank 0 in order, then those of rank 1, ...
        makespan: The time at which the last action ends.
        bubble: The share (0 to 1) of the time of all ranks during which they are idle.
        peaks: The peak memory of each rank, in the unit of `Costs.held`.
    """

    spans: tuple[SimulatedAction, ...]
    makespan: float
    bubble: float
    peaks: tuple[float, ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: The actions of each rank.
        costs: The costs of each stage; unit costs by default.

    Raises:
        LayoutError: The costs have another number of stages than the schedule, or the schedule
            deadlocks.
    """
    ranks = len(schedule)
    stages = count_stages(schedule)
    costs = Costs.unit(ranks, stages // ranks) if costs is None else costs
    if len(costs.forward) != stages:
        raise LayoutError(f"costs of {len(costs.forward)} stages for a schedule of {stages}")
    ends: dict[Product | None, float] = {}
    free = [0.0] * ranks
    spans: list[SimulatedAction] = []
    for rank, action in iterate_in_order(schedule):
        arrivals = [
            ends[product] + _get_transfer(costs, product, action.stage, ranks)
            for product in get_dependencies(action, stages)
        ]
        begin = max(free[rank], *arrivals) if arrivals else free[rank]
        free[rank] = begin + costs.get_duration(action)
        ends[get_product(action)] = free[rank]
        spans.append(SimulatedAction(rank, action, begin, free[rank]))
    makespan = max(free)
    busy = math.fsum(span.end - span.begin for span in spans)
    return Simulation(
        spans=tuple(sorted(spans, key=lambda span: span.rank)),
        makespan=makespan,
        bubble=max(0.0, 1 - busy / (ranks * makespan)) if makespan else 0.0,
        peaks=tuple(_compute_peak(actions, costs) for actions in schedule),
    )


def _get_transfer(costs: Costs, product: Product, stage: int, ranks: int) -> float:
    """Return the time of the transfer of a product to `stage`; 0 within a rank."""
    source = product[1]
    return costs.transfer[min(source, stage)] if (source - stage) % ranks else 0.0


def _compute_peak(actions: Sequence[Action], costs: Costs) -> float:
    """Return the peak memory of a rank; a micro-batch is freed at the end of its backward."""
    peak = now = 0.0
    for action in actions:
        if action.kind == "forward":
            now += costs.held[action.stage]
            peak = max(peak, now)
        elif action.kind in ("backward", "weight"):
            now -= costs.held[action.stage]
    return peak
