"""`python -m benchmarks.step`: whole training steps, compared with PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.progress import Progress, about, status
from lockstep.cli import run
from lockstep.files import write_output
from lockstep.formatting import format_size
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.tools.commands.bench import (
    RANKS_HELP,
    describe_command,
    describe_machine,
)
from lockstep.tools.commands.options import parse_rank_counts

if TYPE_CHECKING:
    from benchmarks.step.comparison import Outcome
    from benchmarks.step.contenders import Case
    from benchmarks.step.exactness import Exactness
    from benchmarks.step.widths import Digests

__all__ = ["command"]

MODELS = "1m,25m,transformer"
OPTIMIZERS = "sgd,adamw"
EVERYBODY = "all"
COPIES = "copies"
MEMCPY = "memcpy"


@click.command()
@click.option("-n", "--nprocs", default="2", show_default=True, help=RANKS_HELP)
@click.option(
    "--models", default=MODELS, show_default=True,
    help="Some of tiny, 1m, 25m, 100m, transformer, resnet50.",
)  # fmt: skip
@click.option("--optimizers", default=OPTIMIZERS, show_default=True)
@click.option(
    "--vs", default=EVERYBODY, show_default=True, metavar="NAMES",
    help="Contenders in addition to the copies: ddp-gloo,trainer.",
)  # fmt: skip
@click.option("--batch", default=32, show_default=True, help="Samples per rank.")
@click.option("--microbatches", default=1, show_default=True, help="Micro-batches per rank.")
@click.option("--seconds", default=1.0, show_default=True, help="Least time per contender.")
@click.option("--rounds", default=3, show_default=True, help="Least blocks per contender.")
@click.option("--block", default=0.4, show_default=True, help="Seconds of a block.")
@click.option("--widths", default="1,2,3,4", show_default=True, help="Ranks to compare digests on.")
@click.option("--timeout", default=120.0, show_default=True, help="Longest wait in seconds.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write results.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a .svg.")
def command(**flags: Any) -> None:
    """Measure training steps: Lockstep's, DistributedDataParallel's, FSDP2's, and none at all.

    Each contender has ranks of its own, one thread each; they take turns, a block
    of steps each, on the same batches with as many micro-batches. The honest
    baseline are copies that run at the same time and exchange nothing: they share
    the memory bus. Parameters are compared with one process of plain PyTorch, and
    the trainer's digest on 1, 2, 3 and 4 ranks. 100m and resnet50 take minutes.
    """
    check(flags)
    counts = parse_rank_counts("-n", flags["nprocs"])
    widths = parse_rank_counts("--widths", flags["widths"])
    cases = wanted(flags)
    names = contenders(flags["vs"])
    check_memory(cases, names, max(counts))
    machine = describe_machine()
    typed = describe_command()
    seconds = max(flags["seconds"], flags["rounds"] * flags["block"])
    expected = estimate(cases, names, counts, widths, seconds)
    click.echo(f"# {machine}\n# {typed}\n# {told(cases, names, counts)}: {about(expected)}")
    log = Progress(expected)
    outcomes: list[Outcome] = []
    for ranks in counts:
        for each in measure_cases(cases, names, ranks, flags, log):
            outcomes += each
        click.echo("\n" + caption(ranks))
    costs = list(exactness(cases, counts, flags, log))
    found = same_digests(cases, names, widths, flags, log)
    status("")
    write(outcomes, costs, found, flags, {"machine": machine, "command": typed})
    judge(outcomes, found)


def check(flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that cannot be meant."""
    if flags["seconds"] <= 0 or flags["timeout"] <= 0:
        raise UsageError("--seconds and --timeout are positive numbers of seconds")
    if flags["rounds"] < 1 or flags["block"] <= 0:
        raise UsageError("--rounds is at least 1, and --block a positive number of seconds")
    batch = flags["batch"]
    count = flags["microbatches"]
    if count < 1 or batch < 1 or batch % count:
        raise UsageError(
            f"--batch {batch} --microbatches {count}: a rank's samples are cut into micro-batches "
            "of one size, so take a number that divides them"
        )
    if flags["plot"] and flags["plot"].suffix != ".svg":
        raise UsageError(f"--plot {flags['plot']}: the suffix must be .svg")
    for file in (flags["file"], flags["plot"]):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")


def wanted(flags: dict[str, Any]) -> list[Case]:
    """Return every model with every optimizer."""
    from benchmarks.step.contenders import Case
    from benchmarks.step.networks import NETWORKS, OPTIMIZERS, chosen

    models = chosen("--models", flags["models"], NETWORKS)
    optimizers = chosen("--optimizers", flags["optimizers"], OPTIMIZERS)
    batch = flags["batch"]
    count = flags["microbatches"]
    return [Case(model, each, batch, count) for model in models for each in optimizers]


def contenders(text: str) -> list[str]:
    """Return the contenders asked for, the copies first; UsageError for one that cannot be."""
    from benchmarks.availability import require_available, unavailable
    from benchmarks.step.contenders import CONTENDERS
    from benchmarks.step.networks import chosen

    without = unavailable(CONTENDERS)
    if text == EVERYBODY:
        if without:
            click.echo(
                f"The backend 'lockstep' is not built here: without {', '.join(without)}, and "
                "the trainer is on gloo.", err=True
            )  # fmt: skip
        return [name for name in CONTENDERS if name not in without]
    names = chosen("--vs", text, CONTENDERS)
    for name in names:
        require_available(name, without)
    return list(dict.fromkeys([COPIES, *names]))


def check_memory(cases: list[Case], names: list[str], ranks: int) -> None:
    """Raise UsageError where the largest case would not fit into memory."""
    import psutil

    case = max(cases, key=lambda each: need(each, names, ranks))
    needed = need(case, names, ranks)
    free = psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"{case.network} with {case.optimizer} on {ranks} ranks of {len(names)} contenders "
            f"needs about {format_size(needed)} of memory, {format_size(free)} are free: choose "
            "fewer with --vs ddp-gloo,trainer, or a smaller model"
        )


def need(case: Case, names: list[str], ranks: int) -> int:
    """Return about how many bytes the contenders of a case hold together."""
    from benchmarks.step.contenders import CONTENDERS
    from benchmarks.step.networks import count

    state = 2 if case.optimizer == "adamw" else 0
    times = sum(CONTENDERS[name].memory + state for name in names)
    return round(4 * count(case.net) * times * ranks)


def estimate(
    cases: list[Case], names: list[str], counts: list[int], widths: list[int], seconds: float
) -> float:
    """Return about how long all of it takes, in seconds."""
    from lockstep.processor_core import count_usable_cores

    whole = 10.0
    for case in cases:
        for ranks in counts:
            crowd = max(1.0, ranks / count_usable_cores())
            step = 1.6 * case.net.step * crowd * case.samples / 32
            each = 1.0 * crowd + 9 * step + 1.4 * max(seconds, 10 * step)
            training = len(names) - (MEMCPY in names)
            whole += each * (training + 1) + (1.0 * crowd + 1.4 * seconds) * (MEMCPY in names)
        whole += sum(1.0 + 8 * case.net.step for _ in widths)
    return whole


def told(cases: list[Case], names: list[str], counts: list[int]) -> str:
    """Return what will be measured."""
    ranks = ",".join(map(str, counts))
    return f"{len(cases)} cases, {len(names) + 1} contenders, {ranks} ranks"


def measure_cases(
    cases: list[Case], names: list[str], ranks: int, flags: dict[str, Any], log: Progress
) -> Iterator[list[Outcome]]:
    """Measure and print one case after another."""
    from benchmarks.step import table
    from benchmarks.step.comparison import measure_case
    from benchmarks.step.pairs import pair_lines

    for case in cases:
        log.subject = f"{case.network}, {case.optimizer}, {ranks} ranks: "
        outcomes = measure_case(
            case, names, ranks, flags["seconds"], flags["timeout"], log,
            rounds=flags["rounds"], block=flags["block"],
        )  # fmt: skip
        status("")
        lines = ["", table.heading(outcomes), *table.rows(outcomes), *pair_lines(outcomes)]
        click.echo("\n".join(lines))
        yield outcomes


def caption(ranks: int) -> str:
    """Return what stands under the tables."""
    from benchmarks.step import table

    return table.caption(ranks)


def exactness(
    cases: list[Case], counts: list[int], flags: dict[str, Any], log: Progress
) -> Iterator[Exactness]:
    """Measure and print what the tree costs, once a model."""
    from benchmarks.step import table
    from benchmarks.step.exactness import exactness as measure

    click.echo("\n# cost of exactness")
    for case in {case.network: case for case in cases}.values():
        for ranks in counts:
            log.subject = f"{case.network}, {ranks} ranks: "
            log("the gradients, along the tree and in any order")
            cost = measure(case, ranks, flags["seconds"], flags["timeout"])
            status("")
            click.echo(table.exactness_line(cost))
            yield cost


def same_digests(
    cases: list[Case], names: list[str], widths: list[int], flags: dict[str, Any], log: Progress
) -> list[Digests]:
    """Compare and print the digests of the contenders that guarantee them."""
    from benchmarks.step import table
    from benchmarks.step import widths as guarantee
    from benchmarks.step.contenders import CONTENDERS

    if not any(CONTENDERS[name].guaranteed for name in names):
        return []
    log.subject = ""
    log(f"digests on {','.join(map(str, widths))} ranks")
    found = guarantee.digests(cases, names, widths, flags["timeout"])
    status("")
    title = f"{guarantee.SAMPLES} samples in {guarantee.MICROBATCHES} micro-batches"
    click.echo("\n".join([f"\n# digests, {title}", *table.widths_lines(found)]))
    return found


def write(
    outcomes: list[Outcome], costs: list[Exactness], found: list[Digests],
    flags: dict[str, Any], said: dict[str, str],
) -> None:  # fmt: skip
    """Write the files that were asked for."""
    from benchmarks.step.table import records

    if flags["file"]:
        text = json.dumps(records(outcomes, costs, found, said), indent=1)
        write_output(flags["file"], text + "\n")
    if flags["plot"] and any(outcome.times for outcome in outcomes):
        from benchmarks.step.plot import draw

        write_output(flags["plot"], draw(outcomes, said["machine"], said["command"]).svg())


def judge(outcomes: list[Outcome], found: list[Digests]) -> None:
    """Raise WorkError where parameters were wrong, or where nobody could do anything."""
    from benchmarks.step.table import wrong

    if bad := wrong(outcomes, found):
        raise WorkError(f"wrong parameters from {'; '.join(bad)}: see digest and error")
    if not any(outcome.times for outcome in outcomes):
        raise WorkError(f"nothing could be measured: {outcomes[0].error}")


if __name__ == "__main__":
    run(command)
