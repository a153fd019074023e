"""`lockstep schedule`: simulates and draws a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.formatting import format_number, format_percent
from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedules import NAMES

if TYPE_CHECKING:
    from lockstep.pipeline.schedule_planner import SchedulePlan
    from lockstep.pipeline.simulation import Costs
    from lockstep.record.timeline import Timeline

__all__ = ["command"]


@click.command()
@click.argument("name")
@click.option(
    "--stages", type=int, default=4, show_default=True,
    help="Number of ranks, one or more stages each.",
)  # fmt: skip
@click.option(
    "--microbatches", type=int, default=8, show_default=True,
    help="Micro-batches per step.",
)  # fmt: skip
@click.option("--stages-per-rank", type=int, help="Stages per rank for interleaved.  [default: 2]")
def command(
    name: str,
    stages: int,
    microbatches: int,
    stages_per_rank: int | None,
) -> None:
    """Draw the schedule NAME: gpipe, 1f1b, interleaved, zero-bubble, or all.

    Each row is a rank. The number of a box is its micro-batch; a letter after it is
    the stage within the rank. The bubble is the share of idle time, the peak the
    maximum number of activations that a rank holds. A backward takes
    twice as long as a forward, and transfers take no time. Times are in units of one
    forward per rank.
    """
    from lockstep.pipeline.simulation import Costs

    names = NAMES if name == "all" else (name,)
    if name != "all" and name not in NAMES:
        raise LayoutError(f"unknown schedule {name!r}; choose from all, {', '.join(NAMES)}")
    per_rank = stages_per_rank if "interleaved" in names else 1
    # The schedule itself raises an error for numbers below 1.
    costs = Costs.unit(max(1, stages), max(1, 2 if per_rank is None else per_rank))
    plans = make_plans(names, costs, stages, microbatches, stages_per_rank)
    print_plans(plans)


def make_plans(
    names: Sequence[str], costs: Costs, stages: int, microbatches: int, stages_per_rank: int | None
) -> list[SchedulePlan]:
    """Return the plans of schedules; a comparison leaves out impossible schedules."""
    from lockstep.pipeline.schedule_planner import plan_schedule

    plans = []
    for name in names:
        own = stages_per_rank if name == "interleaved" or len(names) == 1 else None
        try:
            plans.append(plan_schedule(name, costs, stages, microbatches, own))
        except LayoutError as error:
            if len(names) == 1 or name == "1f1b":
                raise
            click.echo(f"{name} is left out: {error}", err=True)
    return plans


def make_timeline(one: SchedulePlan) -> Timeline:
    """Return the timeline of a plan."""
    from lockstep.record.timeline import Timeline, TimelineSpan

    spans = tuple(
        TimelineSpan(s.rank, s.action.kind, s.begin, s.end, s.action.stage, s.action.microbatch)
        for s in one.simulation.spans
    )
    title = f"{one.name} · bubble {format_percent(one.simulation.bubble)}"
    title += f" · takes {format_number(one.simulation.makespan)}"
    return Timeline(title, len(one.schedule), spans)


def print_plans(plans: Sequence[SchedulePlan]) -> None:
    """Print the timeline of each plan, the legend, and a table."""
    from lockstep.tools.report.terminal import print_table, wrap
    from lockstep.tools.report.timeline_rendering import print_timeline, text_legend, text_scale

    drawn = [make_timeline(one) for one in plans]
    scale = text_scale(drawn)
    for one in drawn:
        click.echo(one.title)
        print_timeline(one, scale)
        click.echo()
    signs = dict.fromkeys(sign for one in drawn for sign in text_legend(one))
    click.echo("\n".join(wrap("   ".join(signs))) + "\n")
    base = next((one for one in plans if one.name == "1f1b"), plans[0])
    names = ["schedule", "time", f"of {base.name}", "bubble", "peak micro-batches by rank"]
    print_table(names, [make_row(one, base) for one in plans], optional=(names[2],))


def make_row(one: SchedulePlan, base: SchedulePlan) -> list[str]:
    """Return the table row of a plan."""
    length, whole = one.simulation.makespan, base.simulation.makespan
    return [
        one.name,
        format_number(length),
        f"{length / whole:.2f}",
        format_percent(one.simulation.bubble),
        " ".join(f"{round(peak, 2):g}" for peak in one.simulation.peaks),
    ]
