"""The replay: a step that was recorded, simulated with its own times.

    recorded  ──> what each rank did, in order   ──> Schedule ─┐
              └─> how long each kind of work takes ──> Costs ──┴─> simulate ──> Timeline

Its length is what the schedule costs when every piece of work always takes its median
and nothing is ever on its way; what is longer in the recording is transfers, overhead
and unevenness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import get_args

from lockstep.errors import LayoutError
from lockstep.pipeline.schedules import Action, Kind, Schedule
from lockstep.pipeline.simulation import Costs, simulate
from lockstep.record.timeline import Span, Timeline

__all__ = ["measured", "replay"]

KINDS = get_args(Kind)


def replay(recorded: Timeline) -> Timeline | None:
    """Return the simulated timeline of a recorded step; None where it had no stages."""
    works = [w for w in recorded.spans if w.kind in KINDS and None not in (w.stage, w.microbatch)]
    width = recorded.ranks_per_replica
    if width < 2 or recorded.num_ranks % width:
        return None
    costs = measured(recorded)
    found: list[Span] = []
    for first in range(0, recorded.num_ranks, width):
        own = [work for work in works if first <= work.rank < first + width]
        try:
            simulation = simulate(_schedule(own, first, width), costs)
        except LayoutError:  # not all ranks' work was recorded
            return None
        found += [
            Span(
                first + span.rank, span.action.kind, span.begin, span.end, span.action.stage,
                span.action.microbatch,
            )
            for span in simulation.spans
        ]  # fmt: skip
    return Timeline(f"{recorded.title}, simulated", recorded.num_ranks, tuple(found))


def measured(recorded: Timeline) -> Costs:
    """Return the median time of each kind of work on each stage.

    Where a stage's backward was only whole, half of it counts for the weights.
    """
    times: defaultdict[tuple[str, int | None], list[float]] = defaultdict(list)
    for work in recorded.spans:
        times[work.kind, work.stage].append(work.end - work.begin)

    def row(kind: str, otherwise: Callable[[int], float]) -> tuple[float, ...]:
        stages = range(recorded.num_stages)
        return tuple(median(times[kind, s]) if (kind, s) in times else otherwise(s) for s in stages)

    whole = row("backward", lambda _: 0.0)
    inputs = row("input", lambda stage: whole[stage] / 2)
    weights = row("weight", lambda stage: whole[stage] / 2)
    whole = row("backward", lambda stage: inputs[stage] + weights[stage])
    return Costs(row("forward", lambda _: 0.0), inputs, weights, backward=whole)


def _schedule(works: list[Span], first: int, width: int) -> Schedule:
    """Return what the ranks of one replica did, in the order in which they did it."""
    lanes: list[list[Action]] = [[] for _ in range(width)]
    for work in sorted(works, key=lambda work: work.begin):
        kind: Kind = work.kind  # type: ignore[assignment]
        assert work.stage is not None
        assert work.microbatch is not None
        lanes[work.rank - first].append(Action(kind, work.stage, work.microbatch))
    return tuple(map(tuple, lanes))
