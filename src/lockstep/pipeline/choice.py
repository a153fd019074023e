"""The choice: the schedule that the simulator finds fastest for a measured model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import LayoutError
from lockstep.pipeline.balance import partition
from lockstep.pipeline.schedules import Schedule, schedule
from lockstep.pipeline.simulation import Costs, Simulation, grouped, simulate

__all__ = ["Plan", "choose", "plan", "plans"]

CLOSE = 0.01  # share of the time within which a plan counts as no faster than 1F1B


@dataclass(frozen=True)
class Plan:
    """A pipeline, planned: the schedule's name and actions, its cut and its simulation.

    `cut` holds for each stage the range of its pieces, in model order.
    """

    name: str
    stages_per_rank: int
    cut: tuple[range, ...]
    schedule: Schedule
    simulation: Simulation


def plan(
    name: str,
    costs: Costs,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    cut: list[range] | None = None,
) -> Plan:
    """Plan the schedule `name`: cut the pieces of `costs` into its stages, and simulate.

    A `cut` that is given is kept. Raises LayoutError where the pieces are too few, or
    the cut is not into the schedule's stages.
    """
    actions = schedule(name, ranks, microbatches, stages_per_rank)
    stages_per_rank = (
        (2 if stages_per_rank is None else stages_per_rank) if name == "interleaved" else 1
    )
    cut = partition(costs.totals, _crossing(costs), ranks * stages_per_rank) if cut is None else cut
    return Plan(name, stages_per_rank, tuple(cut), actions, simulate(actions, grouped(costs, cut)))


def plans(costs: Costs, ranks: int, microbatches: int) -> Iterator[Plan]:
    """Plan every schedule that the pieces of `costs` suffice for, 1F1B first."""
    for name, stages_per_rank in (
        ("1f1b", 1),
        ("zero-bubble", 1),
        ("gpipe", 1),
        ("interleaved", 2),
    ):
        if name == "1f1b" or ranks * stages_per_rank <= len(costs.forward):
            yield plan(name, costs, ranks, microbatches, stages_per_rank)


def choose(costs: Costs, ranks: int, microbatches: int, memory: float | None = None) -> Plan:
    """Return the plan that the simulator finds fastest; 1F1B unless another is 1 % faster.

    `memory` is the most that a rank may hold, in the unit of `costs.held`. Raises
    LayoutError where the pieces are fewer than ranks, or no plan keeps to the memory.
    """
    found = list(plans(costs, ranks, microbatches))
    fitting = [one for one in found if memory is None or max(one.simulation.peaks) <= memory]
    if not fitting:
        least = min(max(one.simulation.peaks) for one in found)
        raise LayoutError(
            f"every schedule holds activations of {least:g} or more on some rank, and the limit "
            f"is {memory:g}: cut the batch into more micro-batches, or the model into more stages"
        )
    fastest = min(fitting, key=lambda one: one.simulation.makespan)
    if fitting[0].simulation.makespan * (1 - CLOSE) <= fastest.simulation.makespan:
        return fitting[0]
    return fastest


def _crossing(costs: Costs) -> list[float]:
    """Return what a cut at each boundary costs: the activation's way and its gradient's."""
    return [2 * time for time in costs.transfer]
