"""`lockstep chaos`: kills ranks of a training at random moments, and compares the bits."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from lockstep.formatting import format_duration, format_quantity
from lockstep.kernel.errors import UsageError
from lockstep.messages import log
from lockstep.tools.commands.options import PASSING_ARGUMENTS, json_option, printing_text

if TYPE_CHECKING:
    from lockstep.launcher.launch_config import LaunchConfig
    from lockstep.tools.check.chaos import ChaosResult

__all__ = ["command"]

COLUMNS = ("kill", "member", "rank", "step")


@click.command(context_settings=PASSING_ARGUMENTS)
@click.option(
    "-n", "--nprocs", default=4, show_default=True, type=click.IntRange(min=1),
    help="Number of ranks.",
)  # fmt: skip
@click.option(
    "--kills", default=3, show_default=True, type=click.IntRange(min=1),
    help="Number of ranks to kill.",
)  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
    help="Random seed of the kills: which rank, in which step, how far into it.",
)  # fmt: skip
@click.option("--runs", default="runs", show_default=True, metavar="DIR", help="Folder of runs.")
@json_option
@click.argument("target", metavar="RECIPE_OR_SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nprocs: int,
    kills: int,
    seed: int,
    runs: str,
    as_json: bool,
    target: str,
    arguments: tuple[str, ...],
) -> None:
    """Train RECIPE_OR_SCRIPT twice on N ranks, kill ranks in the second run, compare the bits.

    No rank is killed in the first run. In the second one, an elastic run as started by
    `lockstep run --min 1 --max N`, ranks are killed with SIGKILL at random moments; the others
    continue and new ranks join. Both digests must be equal. A rank is never killed while no
    other one has the state of the training.

    ARGUMENTS are those of `lockstep train RECIPE` or of the script. Options of this command may
    be placed before or after RECIPE_OR_SCRIPT; after "--", all options are passed on.

    Exit status: 0 all kills were carried out and the digests are equal, 1 otherwise, 2 usage
    error, 128+N ended by signal N.
    """
    from lockstep.tools.check.chaos import disturb, train_undisturbed

    if nprocs < 2:
        raise UsageError("-n 1: no rank is left when the only one is killed; use -n 2 or more")
    config = make_elastic_config(target, arguments, nprocs, runs)
    log(f"training {target} undisturbed on {nprocs} ranks")
    baseline = train_undisturbed(_name_run(config, "undisturbed"))
    log(
        f"undisturbed: {format_quantity(baseline.steps, 'step')} in "
        f"{format_duration(baseline.seconds)}, digest {baseline.digest}, in {baseline.folder}"
    )
    result = disturb(_name_run(config, "chaos"), baseline, kills, seed, log)
    with printing_text(as_json, result.plain):
        print_kills(result)
    sys.exit(0 if result.is_passed else 1)


def make_elastic_config(
    target: str, arguments: tuple[str, ...], nprocs: int, runs: str
) -> LaunchConfig:
    """Return the settings that launch a target as an elastic run, with its output in the logs.

    Raises:
        UsageError: There is no such recipe or script.
        click.UsageError: The recipe has no such options.
    """
    from lockstep.launcher.launch_config import LaunchConfig
    from lockstep.launcher.target import check_target
    from lockstep.tools.commands import train
    from lockstep.tools.recipes import NAMES

    is_recipe = target in NAMES
    if is_recipe:
        train.command.make_context("lockstep train", [target, *arguments])
    else:
        check_target("script", target)
    return LaunchConfig(
        target="lockstep" if is_recipe else target,
        arguments=("train", target, *arguments) if is_recipe else arguments,
        kind="module" if is_recipe else "script",
        nprocs=nprocs,
        log_dir=runs,
        name=target if is_recipe else Path(target).stem,
        shown=frozenset(),
        min_nprocs=1,
    )


def _name_run(config: LaunchConfig, which: str) -> LaunchConfig:
    from lockstep.launcher.run_folder import name_run

    return dataclasses.replace(config, name=name_run(f"{config.name}-{which}"))


def print_kills(result: ChaosResult) -> None:
    """Print a table of the kills and their cost, and the verdict."""
    from lockstep.tools.report.terminal import print_sentences, print_table

    kills = enumerate(result.kills, 1)
    rows = [(number, kill.member, kill.rank, kill.step) for number, kill in kills]
    print_table(COLUMNS, [tuple(map(str, row)) for row in rows])
    click.echo()
    print_sentences(*describe_result(result))


def describe_result(result: ChaosResult) -> list[str]:
    """Return the sentences below the table."""
    killed = f"{len(result.kills)} of {format_quantity(result.planned, 'kill')}"
    lines = [f"{killed} carried out, {format_quantity(result.rounds, 'round')}."]
    if lost := result.seconds_lost:
        lines[0] = lines[0][:-1] + (
            f"; time lost per kill: median {format_duration(median(lost))}, worst "
            f"{format_duration(max(lost))}; "
            f"{format_quantity(result.repeated, 'micro-batch', 'es')} computed twice."
        )
    lines.append(
        f"The run took {format_duration(result.seconds)}, undisturbed "
        f"{format_duration(result.baseline.seconds)}."
    )
    if result.failure:
        lines.append(f"The disturbed run failed: {result.failure}")
    elif result.digest is None:
        lines.append("The disturbed run ended without a digest of its weights.")
    elif result.equal:
        lines.append(f"The weights have the same bits: digest {result.digest}.")
    else:
        lines.append(
            f"The weights differ: digest {result.digest}, undisturbed {result.baseline.digest}. "
            f"Find the first bit that differs with: lockstep bisect {result.baseline.folder} "
            f"{result.folder}"
        )
    if result.folder is not None:
        lines.append(f"See the rounds with: lockstep report {result.folder}")
    return lines
