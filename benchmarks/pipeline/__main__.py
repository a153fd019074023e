"""`python -m benchmarks.pipeline`: a model in two stages, compared with other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.progress import Progress, about, status
from lockstep.cli import run
from lockstep.files import write_output
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.tools.commands.bench import describe_command, describe_machine

if TYPE_CHECKING:
    from benchmarks.pipeline.case import Case
    from benchmarks.pipeline.comparison import Outcome, PipelineParticipant

__all__ = ["command"]

EVERYBODY = "all"
POSITIVE = click.IntRange(min=1)
START = 3.0  # seconds until a contender's ranks are there, about


@click.command()
@click.option(
    "--model", default="resnet50", show_default=True, type=click.Choice(["resnet50", "tiny"]),
    help="tiny shows the overhead of a micro-batch.",
)  # fmt: skip
@click.option("--splits", default="1,2,4,8", show_default=True, help="Micro-batches per batch.")
@click.option("--batch", default=32, show_default=True, type=POSITIVE, help="Samples per batch.")
@click.option(
    "--size", default=128, show_default=True, type=click.IntRange(min=32),
    help="Width and height of the images.",
)  # fmt: skip
@click.option(
    "--vs", default=EVERYBODY, show_default=True, metavar="NAMES",
    help="Contenders in addition to the copies: rpc,lockstep-zb.",
)  # fmt: skip
@click.option(
    "--repeats", default=3, show_default=True, type=POSITIVE,
    help="Blocks of steps with the most micro-batches; a third with the others.",
)  # fmt: skip
@click.option("--timeout", default=120.0, show_default=True, help="Longest wait, seconds.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write results.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a .svg.")
def command(**flags: Any) -> None:
    """Measure ResNet-50 in two stages of one thread: Lockstep's and the peers'.

    Each contender has ranks of its own that live through the run; they take turns on
    the same batches, written anew for each step. The single process that they are
    measured by is one of two side by side, with the same micro-batches. The losses of
    the first steps are compared with that process's, the digests with each other.
    Zero-bubble schedules and measured cuts run with the most micro-batches alone.
    """
    splits = checked(flags)
    names = contenders(flags["vs"])
    check_memory(flags, names)
    machine = describe_machine()
    typed = describe_command()
    expected = estimate(flags, splits, names)
    click.echo(f"# {machine}\n# {typed}\n# {len(names) + 1} contenders: {about(expected)}")
    everything = measured(flags, splits, names, Progress(expected))
    write(everything, flags, {"machine": machine, "command": typed})
    judge(everything)


def checked(flags: dict[str, Any]) -> list[int]:
    """Return the numbers of micro-batches, ascending; UsageError for what cannot be meant."""
    try:
        splits = sorted({int(text) for text in flags["splits"].split(",")})
    except ValueError:
        splits = [0]
    if splits[0] < 1:
        raise UsageError(f"--splits {flags['splits']}: write numbers of micro-batches: 1,2,4,8")
    for each in splits:
        if flags["batch"] % each:
            raise UsageError(
                f"--batch {flags['batch']} cannot be cut into {each} micro-batches of one size, as "
                "the peers need them: take a number that divides it"
            )
    if flags["timeout"] <= 0:
        raise UsageError("--timeout is a positive number of seconds")
    if flags["plot"] and flags["plot"].suffix != ".svg":
        raise UsageError(f"--plot {flags['plot']}: the suffix must be .svg")
    for file in (flags["file"], flags["plot"]):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")
    return splits


def contenders(text: str) -> list[str]:
    """Return the contenders asked for; UsageError for one that cannot be."""
    from benchmarks.availability import require_available, unavailable
    from benchmarks.pipeline.contenders import CONTENDERS, COPIES

    without = unavailable(CONTENDERS)
    if text == EVERYBODY:
        if without:
            sentence = f"The backend 'lockstep' is not built here: without {', '.join(without)}."
            click.echo(sentence, err=True)
        return [name for name in CONTENDERS if name not in (COPIES, *without)]
    names = [name for name in dict.fromkeys(text.split(",")) if name not in ("", COPIES)]
    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--vs {name}: choose from {','.join(CONTENDERS)}")
        require_available(name, without)
    return names


def check_memory(flags: dict[str, Any], names: list[str]) -> None:
    """Raise UsageError where all contenders would not fit into memory."""
    import psutil

    if flags["model"] != "resnet50":
        return
    # Weights, gradients and what a batch leaves in the processes, measured: 1.3 GB at 32 x 128.
    each = 0.5e9 + 0.8e9 * (flags["batch"] / 32) * (flags["size"] / 128) ** 2
    needed = each * (len(names) + 2)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{len(names) + 1} contenders need about {needed / 1e9:.0f} GB of memory, "
            f"{free / 1e9:.0f} GB are free: choose fewer with --vs, or a smaller --batch or --size"
        )


def repeats(flags: dict[str, Any], splits: int, most: int) -> int:
    """Return how often each contender's turn comes."""
    count: int = flags["repeats"]
    return count if splits == most or flags["model"] == "tiny" else max(1, count // 3)


def estimate(flags: dict[str, Any], splits: list[int], names: list[str]) -> float:
    """Return about how long all of it takes, in seconds."""
    from benchmarks.pipeline.case import MODELS
    from benchmarks.pipeline.comparison import BLOCK, CHECKED
    from benchmarks.pipeline.contenders import CONTENDERS

    whole = START * (len(names) + 1)
    single = MODELS[flags["model"]].seconds * flags["batch"] / 32
    if flags["model"] == "resnet50":
        single *= (flags["size"] / 128) ** 2
    for each in splits:
        count = sum(CONTENDERS[name].always or each == splits[-1] for name in names)
        turns = repeats(flags, each, splits[-1])
        whole += (2 + 0.75 * count) * max(single, BLOCK) * turns
        whole += (1 + 0.75 * count) * (single * CHECKED + 0.5)
    return whole


def measured(
    flags: dict[str, Any], splits: list[int], names: list[str], log: Progress
) -> list[list[Outcome]]:
    """Measure and print one number of micro-batches after another."""
    from benchmarks.pipeline import comparison, table
    from benchmarks.pipeline.case import Case

    everything = []
    with comparison.start_participants(names, flags["timeout"], log) as participants:
        for each in splits:
            case = Case(flags["model"], each, flags["batch"], flags["size"])
            log.subject = f"{each} micro-batches: "
            running = chosen(participants, case, splits[-1])
            found = comparison.measure_case(running, case, repeats(flags, each, splits[-1]), log)
            status("")
            click.echo("\n".join(["", table.heading(case), *table.rows(found)]))
            everything.append(found)
    lines = table.overhead_lines(everything) if flags["model"] == "tiny" else []
    click.echo("\n".join(["", *lines, table.caption(everything[-1])]))
    return everything


def chosen(
    participants: list[PipelineParticipant], case: Case, most: int
) -> list[PipelineParticipant]:
    """Return who takes part with that many micro-batches."""
    everybody = case.splits == most or case.model == "tiny"
    return [one for one in participants if everybody or (one.contender.always and not one.alone)]


def write(everything: list[list[Outcome]], flags: dict[str, Any], said: dict[str, str]) -> None:
    """Write the files that were asked for."""
    from benchmarks.pipeline import table

    if flags["file"]:
        found = [one for outcomes in everything for one in table.records(outcomes, said)]
        write_output(flags["file"], json.dumps(found, indent=1) + "\n")
    if flags["plot"]:
        from benchmarks.pipeline.plot import draw

        write_output(flags["plot"], draw(everything, said["machine"], said["command"]).svg())


def judge(everything: list[list[Outcome]]) -> None:
    """Raise WorkError where answers were wrong, or where nobody but the copies could do it."""
    outcomes = [one for outcomes in everything for one in outcomes]
    wrong = [f"{one.name} at {one.case.splits}: {one.wrong}" for one in outcomes if one.wrong]
    if wrong:
        raise WorkError(f"wrong answers: {'; '.join(wrong)}")
    if not any(one.times for one in outcomes):
        raise WorkError(f"nothing could be measured: {outcomes[0].error}")


if __name__ == "__main__":
    run(command)
