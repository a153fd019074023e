"""`lockstep schedule`: simulates and draws a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from lockstep.formatting import format_number, format_percent
from lockstep.kernel.errors import LayoutError
from lockstep.pipeline.schedules import NAMES

if TYPE_CHECKING:
    from rich.text import Text

    from lockstep.pipeline.schedule_planner import SchedulePlan
    from lockstep.pipeline.simulation import Costs

__all__ = ["choose_scale", "command", "draw_ranks"]

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradient of the inputs",
    "weight": "gradients of the weights",
}
SIGNS = {"forward": "-", "backward": "=", "input": "<", "weight": "+"}
STYLES = {
    "forward": "white on blue",
    "backward": "black on green",
    "input": "black on green",
    "weight": "black on yellow",
}
SHORTEST_COLUMNS = 3  # columns of the shortest action, where there is room
LARGEST = {"--stages": 128, "--microbatches": 4096, "--stages-per-rank": 16}
DEFAULT_COLUMNS = 160  # width of a drawing that is not written to a terminal


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
    given = (stages, microbatches, stages_per_rank or 0)
    for (option, largest), number in zip(LARGEST.items(), given, strict=True):
        if number > largest:
            raise LayoutError(f"{option} {number}: at most {largest:,} can be drawn")
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


def print_plans(plans: Sequence[SchedulePlan]) -> None:
    """Draw each plan, and print the legend and a table."""
    from rich.console import Console

    from lockstep.tools.report.terminal import UNLIMITED, print_table, wrap

    scale = choose_scale(plans)
    console = Console(width=UNLIMITED, highlight=False)
    for one in plans:
        title = f"{one.name} · bubble {format_percent(one.simulation.bubble)}"
        click.echo(f"{title} · takes {format_number(one.simulation.makespan)}")
        for line in draw_ranks(one, scale):
            console.print(line, soft_wrap=True)
        click.echo()
    kinds = {span.action.kind for one in plans for span in one.simulation.spans}
    names = [f"0{SIGNS[kind] * 2} {name}" for kind, name in KINDS.items() if kind in kinds]
    click.echo("\n".join(wrap("   ".join(names))) + "\n")
    base = next((one for one in plans if one.name == "1f1b"), plans[0])
    columns = ["schedule", "time", f"of {base.name}", "bubble", "peak micro-batches by rank"]
    print_table(columns, [make_row(one, base) for one in plans], optional=(columns[2],))


def choose_scale(plans: Sequence[SchedulePlan], columns: int | None = None) -> float:
    """Return the columns per unit of time for plans that are drawn below each other.

    The shortest action gets at most three columns, and an integer number of them if the longest
    plan then fits into `columns` (by default the width of the terminal). Otherwise the longest
    plan fills `columns`.
    """
    from lockstep.tools.report.terminal import UNLIMITED, terminal_width

    if columns is None:
        columns = terminal_width() if terminal_width() < UNLIMITED else DEFAULT_COLUMNS
    columns -= max(map(name_width, plans))
    shortest = min(span.end - span.begin for one in plans for span in one.simulation.spans)
    fitting = columns * shortest / max(one.simulation.makespan for one in plans)
    return (min(SHORTEST_COLUMNS, int(fitting)) if fitting >= 1 else fitting) / shortest


def draw_ranks(one: SchedulePlan, scale: float) -> list[Text]:
    """Return one line of text per rank, with `scale` columns per unit of time.

    An action is the number of its micro-batch, padded with the sign of its kind, so it is readable
    without colors. A number that does not fit is left out.
    """
    from rich.text import Text

    ranks = len(one.schedule)
    margin = name_width(one)
    lines = [Text(f"rank {rank}".ljust(margin)) for rank in range(ranks)]
    for span in one.simulation.spans:
        line = lines[span.rank]
        action = span.action
        begin, end = (margin + round(time * scale) for time in (span.begin, span.end))
        line.append(" " * (begin - len(line)))
        label = f"{action.microbatch}"
        if one.stages_per_rank > 1:
            label += chr(ord("a") + action.stage // ranks % 26)
        text = label if len(label) <= end - begin else ""
        line.append(text.ljust(end - begin, SIGNS[action.kind]), STYLES[action.kind])
    return lines


def name_width(one: SchedulePlan) -> int:
    """Return the number of columns of the names of the ranks."""
    return len(f"rank {len(one.schedule) - 1}") + 2


def make_row(one: SchedulePlan, base: SchedulePlan) -> list[str]:
    """Return the table row of a plan."""
    length = one.simulation.makespan
    whole = base.simulation.makespan
    return [
        one.name,
        format_number(length),
        f"{length / whole:.2f}",
        format_percent(one.simulation.bubble),
        " ".join(f"{round(peak, 2):g}" for peak in one.simulation.peaks),
    ]
