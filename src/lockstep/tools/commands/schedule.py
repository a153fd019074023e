"""`lockstep schedule`: simulates and draws a pipeline schedule."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.formatting import format_bytes, format_duration, format_number, format_percent
from lockstep.kernel.errors import FileError, LayoutError, UsageError
from lockstep.pipeline.schedules import NAMES

if TYPE_CHECKING:
    from lockstep.pipeline.schedule_planner import SchedulePlan
    from lockstep.pipeline.simulation import Costs
    from lockstep.record.reader import Run
    from lockstep.record.timeline import Timeline

__all__ = ["command"]

FIELDS = ("forward", "input", "weight", "transfer", "backward", "held")


@click.command()
@click.argument("name")
@click.option(
    "--stages", type=int,
    help="Number of ranks, one or more stages each.  [default: 4, or that of the run of --costs]",
)  # fmt: skip
@click.option(
    "--microbatches", type=int,
    help="Micro-batches per step.  [default: 8, or those of a replica of the run of --costs]",
)  # fmt: skip
@click.option("--stages-per-rank", type=int, help="Stages per rank for interleaved.  [default: 2]")
@click.option(
    "--costs", "file", type=click.Path(path_type=Path),
    help="Costs of stages or blocks: a run or a JSON file.  [default: equal costs, a backward "
    "takes twice as long as a forward, transfers take no time]",
)  # fmt: skip
def command(
    name: str,
    stages: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    file: Path | None,
) -> None:
    """Draw the schedule NAME: gpipe, 1f1b, interleaved, zero-bubble, or all.

    Each row is a rank. The number of a box is its micro-batch; a letter after it is
    the stage within the rank. The bubble is the share of idle time, the peak the
    maximum number of activations that a rank holds. If there are costs of more blocks
    than stages, blocks are partitioned so that the slowest stage is as fast as possible.
    """
    from lockstep.pipeline.simulation import Costs

    names = NAMES if name == "all" else (name,)
    if name != "all" and name not in NAMES:
        raise LayoutError(f"unknown schedule {name!r}; choose from all, {', '.join(NAMES)}")
    run = open_run(file) if file else None
    stages, microbatches = choose_layout(run, stages, microbatches)
    measured = run or file
    if measured is None:
        per_rank = stages_per_rank if "interleaved" in names else 1
        # The schedule itself raises an error for numbers below 1.
        costs = Costs.unit(max(1, stages), max(1, 2 if per_rank is None else per_rank))
    else:
        costs = read_costs(measured)
    plans = make_plans(names, costs, stages, microbatches, stages_per_rank)
    time = format_duration if file else format_number
    drawn = [make_timeline(one, time) for one in plans]
    in_bytes = file is not None and max(costs.held) > 1
    print_plans(plans, drawn, time, format_bytes if in_bytes else format_peak)
    if file is None:
        click.echo("\nTimes are in units of one forward per rank. Peaks are in micro-batches.")


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


def open_run(file: Path) -> Run | None:
    """Return the run of `--costs`; None for a JSON file."""
    from lockstep.record.reader import read_run

    try:
        is_run = file.is_dir() or file.suffix == ".jsonl"
    except OSError as error:  # for example, the name is too long
        raise UsageError(f"--costs {os.fspath(file)[:40]}...: {error.strerror}") from None
    return read_run(file) if is_run else None


def choose_layout(run: Run | None, stages: int | None, microbatches: int | None) -> tuple[int, int]:
    """Return the given numbers of ranks and micro-batches, else those of the run, else 4 and 8."""
    from lockstep.record.timeline import typical_timeline
    from lockstep.tools.report.summary import number_or

    step = None if run is None else typical_timeline(run)
    if run is None or step is None or not step.num_stages:
        return 4 if stages is None else stages, 8 if microbatches is None else microbatches
    ranks = step.ranks_per_replica
    replicas = max(1, step.num_ranks // ranks)
    per_replica = math.ceil(number_or(run.layout.get("microbatches"), 8) / replicas)
    return (
        ranks if stages is None else stages,
        per_replica if microbatches is None else microbatches,
    )


def read_costs(measured: Run | Path) -> Costs:
    """Return the costs of a JSON file, or of a run."""
    from lockstep.pipeline.simulation import Costs

    if isinstance(measured, Path):
        costs = read_json(measured)
    elif (costs := measured.header.get("costs")) is None:
        return recorded_costs(measured)
    file = measured if isinstance(measured, Path) else measured.folder
    try:
        fields = {name: tuple(map(float, costs.get(name, ()))) for name in FIELDS}
    except (AttributeError, TypeError, ValueError):
        raise FileError(
            f"{file} has no costs: expected a JSON object of lists of numbers, {', '.join(FIELDS)}"
        ) from None
    return Costs(**fields)


def recorded_costs(run: Run) -> Costs:
    """Return the costs of the stages in a typical step of a run."""
    from lockstep.pipeline.simulation import measure_costs
    from lockstep.record.timeline import typical_timeline

    step = typical_timeline(run)
    if step is None or not step.num_stages:
        raise UsageError(
            f"the run {run.folder} has no measured costs, because it has no pipeline stages"
        )
    return measure_costs(step)


def read_json(file: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise FileError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise FileError(f"{file} is not a JSON file") from None


def make_timeline(one: SchedulePlan, time: Callable[[float], str]) -> Timeline:
    """Return the timeline of a plan."""
    from lockstep.record.timeline import Timeline, TimelineSpan

    spans = tuple(
        TimelineSpan(s.rank, s.action.kind, s.begin, s.end, s.action.stage, s.action.microbatch)
        for s in one.simulation.spans
    )
    title = f"{one.name} · bubble {format_percent(one.simulation.bubble)}"
    title += f" · takes {time(one.simulation.makespan)}"
    return Timeline(title, len(one.schedule), spans)


def print_plans(
    plans: Sequence[SchedulePlan],
    drawn: Sequence[Timeline],
    time: Callable[[float], str],
    memory: Callable[[float], str],
) -> None:
    """Print the timeline of each plan, the legend, and a table."""
    from lockstep.tools.report.terminal import print_table, wrap
    from lockstep.tools.report.timeline_rendering import print_timeline, text_legend, text_scale

    scale = text_scale(drawn)
    for one in drawn:
        click.echo(one.title)
        print_timeline(one, scale)
        click.echo()
    signs = dict.fromkeys(sign for one in drawn for sign in text_legend(one))
    click.echo("\n".join(wrap("   ".join(signs))) + "\n")
    base = next((one for one in plans if one.name == "1f1b"), plans[0])
    against = f"of {base.name}"
    names = ["schedule", "time", against, "bubble", "peak activations by rank", "blocks per stage"]
    rows = [make_row(one, base, time, memory) for one in plans]
    print_table(names, rows, optional=("blocks per stage", against))


def make_row(
    one: SchedulePlan,
    base: SchedulePlan,
    time: Callable[[float], str],
    memory: Callable[[float], str],
) -> list[str]:
    """Return the table row of a plan."""
    length, whole = one.simulation.makespan, base.simulation.makespan
    return [
        one.name,
        time(length),
        f"{length / whole:.2f}" if whole else "",
        format_percent(one.simulation.bubble),
        " ".join(memory(peak) for peak in one.simulation.peaks),
        " ".join(str(len(stage)) for stage in one.ranges),
    ]


def format_peak(peak: float) -> str:
    """Format a peak as a number of micro-batches."""
    return f"{peak:g}" if peak == round(peak, 2) else f"{peak:.2f}"
