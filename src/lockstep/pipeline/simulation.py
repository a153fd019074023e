"""The simulation: what a schedule costs, before anything is run.

Each rank works through its actions in order; an action begins when its rank is free
and what it needs has arrived. A transfer takes its time and keeps no rank busy.

    rank 0   F0  F1  ..waits..  B0  B1        bubble = idle / (ranks x makespan)
    rank 1   ..  F0  B0  F1  B1  ........
             0   1   2              makespan

The same costs decide where a model is cut and which schedule is chosen, so they are
kept for pieces: the blocks of a model, or its stages, which are blocks added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import LayoutError
from lockstep.pipeline.schedules import Action, Product, Schedule, in_order, made, needed, stages_of

__all__ = ["Costs", "Simulation", "Span", "grouped", "simulate"]


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs on each piece of a model, in one unit of time.

    `forward`, `input` and `weight` (the two parts of a backward) are per piece, and so
    is `backward`, a whole one: the sum of its parts where it is left out. `transfer`
    is the time that an activation, and later its gradient, takes across each boundary
    between pieces. `held` is what a forward keeps in memory until the backward: 1 a
    piece, or bytes. Raises LayoutError where lengths differ or a number is negative.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    held: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Fill in what was left out, and check."""
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
        for name in ("forward", "input", "weight", "backward", "held", "transfer"):
            self._check(name, pieces - (name == "transfer"))

    def _check(self, name: str, wanted: int) -> None:
        given: Sequence[float] = getattr(self, name)
        if len(given) != wanted or not len(self.forward):
            raise LayoutError(
                f"costs: {name} has {len(given)} numbers, but {len(self.forward)} pieces "
                f"(those of forward) want {wanted}"
            )
        for number in given:
            if not (math.isfinite(number) and number >= 0):
                raise LayoutError(f"costs: {name} holds {number}; a cost is a number from 0")

    @classmethod
    def unit(cls, ranks: int, stages_per_rank: int = 1) -> Costs:
        """Return the costs by which schedules are compared.

        A rank's share of the model costs 1 forward and 2 backward, half of that for
        the weights, and holds 1; it is cut evenly into `stages_per_rank` stages.
        """
        piece = (1 / stages_per_rank,) * (ranks * stages_per_rank)
        return cls(piece, piece, piece, held=piece)

    def of(self, action: Action) -> float:
        """Return how long an action takes."""
        times: tuple[float, ...] = getattr(self, action.kind)
        return times[action.stage]

    @property
    def totals(self) -> tuple[float, ...]:
        """What each piece costs forward and backward together."""
        return tuple(map(sum, zip(self.forward, self.backward, strict=True)))


def grouped(costs: Costs, cut: Sequence[range]) -> Costs:
    """Return the costs of stages, each a contiguous range of the pieces."""

    def added(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(math.fsum(values[piece] for piece in stage) for stage in cut)

    return Costs(
        added(costs.forward),
        added(costs.input),
        added(costs.weight),
        tuple(costs.transfer[stage.stop - 1] for stage in cut[:-1]),
        added(costs.backward),
        added(costs.held),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank worked on an action."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule in time: its spans, each rank's in order.

    `makespan` is when the last action ends. `bubble` is the share, 0 to 1, of all
    ranks' time up to then in which a rank idles. `peaks` is for each rank the most
    that it holds at once, in the unit of `Costs.held`.
    """

    spans: tuple[Span, ...]
    makespan: float
    bubble: float
    peaks: tuple[float, ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule on paper; unit costs unless others are given.

    Raises LayoutError where the costs are not those of the schedule's stages, or the
    ranks would wait for each other for ever.
    """
    ranks, stages = len(schedule), stages_of(schedule)
    costs = Costs.unit(ranks, stages // ranks) if costs is None else costs
    if len(costs.forward) != stages:
        raise LayoutError(f"costs of {len(costs.forward)} stages for a schedule of {stages}")
    ends: dict[Product | None, float] = {}
    free = [0.0] * ranks
    spans: list[Span] = []
    for rank, action in in_order(schedule):
        arrivals = [
            ends[product] + _transfer(costs, product, action.stage, ranks)
            for product in needed(action, stages)
        ]
        begin = max(free[rank], *arrivals) if arrivals else free[rank]
        free[rank] = ends[made(action)] = begin + costs.of(action)
        spans.append(Span(rank, action, begin, free[rank]))
    makespan = max(free)
    busy = math.fsum(span.end - span.begin for span in spans)
    return Simulation(
        spans=tuple(sorted(spans, key=lambda span: span.rank)),
        makespan=makespan,
        bubble=max(0.0, 1 - busy / (ranks * makespan)) if makespan else 0.0,
        peaks=tuple(_peak(actions, costs) for actions in schedule),
    )


def _transfer(costs: Costs, product: Product, stage: int, ranks: int) -> float:
    """Return how long a product is on its way to `stage`; nothing within a rank."""
    source = product[1]
    return costs.transfer[min(source, stage)] if (source - stage) % ranks else 0.0


def _peak(actions: Sequence[Action], costs: Costs) -> float:
    """Return the most that a rank holds; a micro-batch is let go by the end of its backward."""
    peak = now = 0.0
    for action in actions:
        if action.kind == "forward":
            now += costs.held[action.stage]
            peak = max(peak, now)
        elif action.kind in ("backward", "weight"):
            now -= costs.held[action.stage]
    return peak
