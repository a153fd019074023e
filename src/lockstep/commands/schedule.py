"""`lockstep schedule`: a pipeline's schedule, drawn before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.commands.report import save
from lockstep.errors import FileError, LayoutError, UsageError
from lockstep.formatting import format_bytes, format_duration, format_number, format_percent
from lockstep.pipeline.choice import Plan, plan
from lockstep.pipeline.schedules import NAMES
from lockstep.pipeline.simulation import Costs
from lockstep.record.timeline import Span, Timeline
from lockstep.report.terminal import print_table, wrap
from lockstep.report.timeline import draw_timelines, print_timeline, text_legend, text_scale

if TYPE_CHECKING:
    from lockstep.record.reader import Run

__all__ = ["command"]

FIELDS = ("forward", "input", "weight", "transfer", "backward", "held")


def numbers(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    """Return the numbers of an option like --forward 1,2,1.5."""
    try:
        return None if value is None else tuple(float(number) for number in value.split(","))
    except ValueError:
        raise UsageError(
            f"schedule: {option.opts[0]} takes numbers with commas between them (1,2,1.5), "
            f"not {value}"
        ) from None


def by_hand(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option of one row of costs."""
    return click.option(name, callback=numbers, metavar="N,N,...", help=text)


@click.command()
@click.argument("name")
@click.option("--stages", default=4, show_default=True, help="Ranks of the pipeline.")
@click.option("--microbatches", default=8, show_default=True, help="Micro-batches of a step.")
@click.option("--stages_per_rank", type=int, help="Stages a rank, for interleaved (2 by default).")
@click.option("--compare", is_flag=True, help="Draw all the others beside it.")
@click.option("--costs", "file", type=click.Path(), help="Measured costs: a run, or a JSON file.")
@by_hand("--forward", "Time of a forward, for each stage or block.")
@by_hand("--backward", "Time of a backward; twice a forward by default.")
@by_hand("--weight", "Its part for the weights; half by default.")
@by_hand("--transfer", "Time of the way across each boundary.")
@click.option("--svg", type=click.Path(), help="Also write the picture here; '-' writes only it.")
def command(
    name: str,
    stages: int,
    microbatches: int,
    stages_per_rank: int | None,
    compare: bool,
    file: str | None,
    svg: str | None,
    **given: tuple[float, ...] | None,
) -> None:
    """Draw the schedule NAME: gpipe, 1f1b, interleaved, zero-bubble, or all.

    Each lane is a rank; the number on a piece of work is its micro-batch, a letter
    after it which of the rank's stages. Bubble is the share of time in which ranks
    idle; the peak is the activations that each rank holds at once. Costs of more
    blocks than stages are cut where the slowest stage is fastest.
    """
    names = NAMES if compare or name == "all" else (name,)
    if name != "all" and name not in NAMES:
        raise LayoutError(f"there is no schedule {name!r}; there are all, {', '.join(NAMES)}")
    costs = costs_of(file, given, stages, stages_per_rank if "interleaved" in names else 1)
    plans = planned(names, costs, stages, microbatches, stages_per_rank)
    time = format_duration if file else format_number
    drawn = [timeline(one, time) for one in plans]
    title = f"{', '.join(one.name for one in plans)}: {stages} ranks, {microbatches} micro-batches"
    if svg != "-":
        in_bytes = file is not None and max(costs.held) > 1
        show(plans, drawn, time, format_bytes if in_bytes else held)
        if file is None:
            click.echo(
                "\nTimes: in those given, or in forwards of a rank. Peaks: in micro-batches."
            )
    if svg:
        save(draw_timelines(drawn, title).svg().encode(), svg)


def planned(
    names: Sequence[str], costs: Costs, stages: int, microbatches: int, stages_per_rank: int | None
) -> list[Plan]:
    """Return the plans of `names`; in a comparison, of those that the costs suffice for."""
    found = []
    for name in names:
        own = stages_per_rank if name == "interleaved" or len(names) == 1 else None
        try:
            found.append(plan(name, costs, stages, microbatches, own))
        except LayoutError as error:
            if len(names) == 1 or name == "1f1b":
                raise
            click.echo(f"{name} is left out: {error}", err=True)
    return found


def costs_of(
    file: str | None,
    given: dict[str, tuple[float, ...] | None],
    stages: int,
    stages_per_rank: int | None,
) -> Costs:
    """Return the costs that the options name; unit costs where they name none."""
    if file:
        if any(given.values()):
            raise UsageError("schedule: give --costs or the numbers by hand, not both")
        return read_costs(Path(file))
    forward = given["forward"]
    if forward is None:
        if any(given.values()):
            raise UsageError("schedule: --backward, --weight and --transfer want --forward too")
        # Numbers below 1 are refused by the schedule, with its own sentence.
        return Costs.unit(max(1, stages), max(1, 2 if stages_per_rank is None else stages_per_rank))
    backward = given["backward"] or tuple(2 * cost for cost in forward)
    weight = given["weight"] or tuple(cost / 2 for cost in backward)
    inputs = tuple(whole - part for whole, part in zip(backward, weight, strict=False))
    share = (stages / len(forward),) * len(forward)  # so that a rank's share of blocks holds 1
    return Costs(forward, inputs, weight, given["transfer"] or (), backward, share)


def read_costs(file: Path) -> Costs:
    """Read costs from a JSON file, or from the first line of a run's record."""
    if file.is_dir() or file.suffix == ".jsonl":
        from lockstep.record.reader import read_run

        run = read_run(file)
        found = run.header.get("costs")
        if found is None:
            return recorded_costs(run)
    else:
        found = parsed(file)
    try:
        fields = {name: tuple(map(float, found.get(name, ()))) for name in FIELDS}
    except (AttributeError, TypeError, ValueError):
        raise FileError(
            f"{file} holds no costs: it is to be a JSON object of lists of numbers, "
            f"{', '.join(FIELDS)}"
        ) from None
    return Costs(**fields)


def recorded_costs(run: Run) -> Costs:
    """Return what the stages of a run took in its typical step."""
    from lockstep.pipeline.replay import measured
    from lockstep.record.timeline import typical_timeline

    step = typical_timeline(run)
    if step is None or not step.num_stages:
        raise UsageError(f"the run {run.folder} holds no measured costs; only those with stages do")
    return measured(step)


def parsed(file: Path) -> Any:
    """Return what a JSON file holds."""
    try:
        return json.loads(file.read_text())
    except OSError as error:
        raise FileError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError:
        raise FileError(f"{file} is no JSON file") from None


def timeline(one: Plan, time: Callable[[float], str]) -> Timeline:
    """Return a plan as what is drawn."""
    spans = tuple(
        Span(s.rank, s.action.kind, s.begin, s.end, s.action.stage, s.action.microbatch)
        for s in one.simulation.spans
    )
    title = f"{one.name} · bubble {format_percent(one.simulation.bubble)}"
    title += f" · takes {time(one.simulation.makespan)}"
    return Timeline(title, len(one.schedule), spans)


def show(
    plans: Sequence[Plan],
    drawn: Sequence[Timeline],
    time: Callable[[float], str],
    memory: Callable[[float], str],
) -> None:
    """Print the plans: each chart, what its signs mean, and the figures side by side."""
    scale = text_scale(drawn)
    for one in drawn:
        click.echo(one.title)
        print_timeline(one, scale)
        click.echo()
    signs = dict.fromkeys(sign for one in drawn for sign in text_legend(one))
    click.echo("\n".join(wrap("   ".join(signs))) + "\n")
    base = next((one for one in plans if one.name == "1f1b"), plans[0])
    against = f"of {base.name}'s"
    names = ["schedule", "time", against, "bubble", "peak activations by rank", "blocks a stage"]
    rows = [row(one, base, time, memory) for one in plans]
    print_table(names, rows, optional=("blocks a stage", against))


def row(
    one: Plan, base: Plan, time: Callable[[float], str], memory: Callable[[float], str]
) -> list[str]:
    """Return the figures of a plan."""
    length, whole = one.simulation.makespan, base.simulation.makespan
    return [
        one.name,
        time(length),
        f"{length / whole:.2f}" if whole else "",
        format_percent(one.simulation.bubble),
        " ".join(memory(peak) for peak in one.simulation.peaks),
        " ".join(str(len(stage)) for stage in one.cut),
    ]


def held(peak: float) -> str:
    """Return a peak as a number of micro-batches."""
    return f"{peak:g}" if peak == round(peak, 2) else f"{peak:.2f}"
