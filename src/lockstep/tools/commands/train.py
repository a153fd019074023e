"""`lockstep train`: trains a recipe on N ranks, and prints a digest at the end."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.files import replace_file
from lockstep.formatting import format_digest, format_loss, format_quantity
from lockstep.kernel.errors import FileError, LayoutError, UsageError
from lockstep.launcher.environment import read_rank_info
from lockstep.launcher.rank_process import get_task
from lockstep.messages import log
from lockstep.portable.variables import find_of_numpy, read_portable_request
from lockstep.tools.commands.options import json_option
from lockstep.tools.commands.recorded_options import (
    open_resumed,
    recall_options,
    resolve_options,
)
from lockstep.tools.recipes import NAMES

__all__ = ["command", "print_summary"]

POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.FloatRange(min=0, max=float("inf"), max_open=True)
SUMMARY_FILE = "summary.json"  # the summary of a run whose ranks are processes of `lockstep run`


@click.command()
@click.argument("recipe", metavar="[RECIPE]", type=click.Choice(NAMES), required=False)
@click.option(
    "-n", "--nprocs", default=1, show_default=True, type=POSITIVE, help="Number of ranks."
)
@click.option(
    "--min", "least", metavar="A", type=POSITIVE,
    help="Continue without killed ranks while at least A are left.  [default: all are needed; "
    "with --max: 1]",
)  # fmt: skip
@click.option(
    "--max", "most", metavar="B", type=POSITIVE,
    help="Start with B ranks instead of -n, and replace killed ones.  [default with --min: -n]",
)  # fmt: skip
@click.option(
    "--microbatches", default=8, show_default=True, type=POSITIVE,
    help="Micro-batches per global batch; changes the results, unlike the number of ranks.",
)  # fmt: skip
@click.option(
    "--stages", default=1, show_default=True, type=POSITIVE,
    help="Pipeline stages; -n must be a multiple of it.",
)  # fmt: skip
@click.option("--epochs", type=POSITIVE, help="Number of epochs.  [default: 30]")
@click.option(
    "--batch-size", type=POSITIVE,
    help="Samples per global batch, over all ranks.  [default: 32]",
)  # fmt: skip
@click.option("--lr", type=NOT_NEGATIVE, help="Learning rate of SGD.  [default: 0.02]")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
    help="Random seed for initialization, shuffling and dropout.",
)  # fmt: skip
@click.option(
    "--threads", type=POSITIVE,
    help="Threads per rank.  [default: the cores, divided by the ranks; with --no-portable: 1]",
)  # fmt: skip
@click.option(
    "--workers", default=0, show_default=True, type=click.IntRange(min=0),
    help="Loader processes per rank.",
)  # fmt: skip
@click.option(
    "--portable/--no-portable", default=None,
    help="Compute the same bits on every x86-64 processor with AVX2, on the CPU.  [default: "
    "whether the variable LOCKSTEP_PORTABLE is 1; without it: on, where the machine can]",
)  # fmt: skip
@click.option("--bf16", is_flag=True, help="Mixed precision with bfloat16 autocast.")
@click.option(
    "--checkpoint-every", metavar="N", type=POSITIVE,
    help="Steps between two checkpoints.  [default: as many as take 10 to 300 s, depending on the "
    "cost of a checkpoint]",
)  # fmt: skip
@click.option(
    "--resume", metavar="RUN",
    help="Continue this run, a name under --runs or a folder, with its recipe and options.",
)  # fmt: skip
@click.option("--runs", default="runs", show_default=True, metavar="DIR", help="Folder of runs.")
@click.option("--name", metavar="NAME", help="Name of the run.  [default: recipe, date and time]")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
def command(
    recipe: str | None,
    nprocs: int,
    least: int | None,
    most: int | None,
    runs: str,
    name: str | None,
    resume: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train RECIPE on N ranks, as replicas or pipeline stages.

    Results are bit-identical in every layout. The record, the weights and the checkpoints
    of the run are written to runs/NAME.

    --resume RUN continues a run from its latest checkpoint, with the results of an
    uninterrupted one. RECIPE and options are then those of the run; -n, --stages,
    --workers and --checkpoint-every may differ.

    --min A --max B makes an elastic run: when a rank is killed, the run continues, with the same
    bits.

    In a rank of `lockstep run -m lockstep train RECIPE ...` this process trains as that rank, and
    the run is that of the launch.

    Exit status: 0 success, 1 the training failed, 2 usage error, 75 stopped on request
    after saving a checkpoint, 128+N ended by signal N.
    """
    from lockstep.launcher.failure_codes import STOPPED
    from lockstep.launcher.launch import launch
    from lockstep.launcher.run_folder import create_run_folder, name_run

    is_rank = get_task() is not None
    is_elastic = least is not None or most is not None
    resumed = None
    if resume is not None:
        if is_rank:
            raise UsageError(
                "--resume is an option of the launch here: lockstep run --resume RUN -m lockstep "
                "train RECIPE ..."
            )
        resumed = open_resumed(resume, runs)
        recipe, nprocs = recall_options(resumed, nprocs, given)
    if given["portable"] is None:
        given["portable"] = read_portable_request(os.environ)
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'; or continue a run with --resume RUN.")
    if is_rank:
        nprocs = read_rank_info(os.environ).world_size
    elif most is not None:
        nprocs = most
    _check_layout(nprocs, given["stages"], given["microbatches"])
    if is_rank:
        _train_in_rank(recipe, given, as_json)
        return
    if resumed is not None:
        folder = resumed.folder
    elif is_elastic or name:  # the launch, or the record, creates the folder
        folder = Path(runs) / (name or name_run(recipe))
    else:
        folder = create_run_folder(Path(runs), name_run(recipe))
    if given["portable"] is not False:
        os.environ |= find_of_numpy() | os.environ  # numpy reads them when the fork server loads it
    if is_elastic:
        words = _list_words(recipe, given)
        summary = _train_elastic(words, nprocs, least or 1, folder, resumed is not None)
        print_summary(summary, given["quiet"], as_json)
        return
    try:
        summary = launch(_rank, (recipe, given, str(folder), resumed is not None), nprocs)[0]
    except SystemExit as stop:
        if stop.code == STOPPED:
            log(f"continue with: {shlex.join(['lockstep', 'train', '--resume', str(folder)])}")
        raise
    print_summary(summary, given["quiet"], as_json)


def _train_in_rank(recipe: str, given: dict[str, Any], as_json: bool) -> None:
    """Train as this process's rank of a launch; rank 0 prints the summary."""
    from lockstep.launcher.run_folder import find_launch_folder, is_resuming
    from lockstep.launcher.world import rank

    folder = find_launch_folder()
    if folder is None:
        raise FileError(
            "the launch has no run folder for the record and the weights; give lockstep run a "
            "--log-dir that is writable"
        )
    summary = _rank(recipe, given, os.path.relpath(folder), is_resuming())
    if rank() == 0:
        with replace_file(folder / SUMMARY_FILE) as file:
            file.write(json.dumps(summary).encode())
        print_summary(summary, given["quiet"], as_json)


def _list_words(recipe: str, given: Mapping[str, Any]) -> list[str]:
    """Return the command line of a rank that trains with these options."""
    words = ["train", recipe]
    for option in command.params:
        value = given.get(option.name or "")
        if value is False and option.secondary_opts:
            words.append(option.secondary_opts[-1])
        if value in (None, False) or value == option.default:
            continue
        words += [option.opts[-1], *([] if value is True else [str(value)])]
    return words


def _train_elastic(
    words: list[str], nprocs: int, least: int, folder: Path, is_resumed: bool
) -> dict[str, Any]:
    """Train in an elastic run, and return the summary from its last rank 0.

    Args:
        words: The command line of a rank.
        nprocs: The number of ranks.
        least: The smallest number of ranks.
        folder: The folder of the run.
        is_resumed: Whether the folder holds a run that is continued.
    """
    from lockstep.elastic.elastic_launch import launch_elastic
    from lockstep.launcher.launch_config import LaunchConfig

    folders: list[Path] = []

    def watch(ranks: object, rounds: object, launched: Path | None) -> None:
        folders.append(folder if launched is None else launched)

    config = LaunchConfig(
        target="lockstep",
        arguments=tuple(words),
        kind="module",
        nprocs=nprocs,
        min_nprocs=least,
        log_dir=str(folder.parent),
        name=None if is_resumed else folder.name,
        resumed_run=folder if is_resumed else None,
        shows_stdout=False,  # this process prints the summary
    )
    if status := launch_elastic(config, watch):
        sys.exit(status)
    summary: dict[str, Any] = json.loads((folders[-1] / SUMMARY_FILE).read_bytes())
    return summary


def _check_layout(nprocs: int, stages: int, microbatches: int) -> None:
    """Raise LayoutError unless the ranks form whole replicas with a micro-batch each."""
    if nprocs % stages:
        raise LayoutError(f"-n {nprocs} must be a multiple of --stages {stages}")
    replicas = nprocs // stages
    if replicas > microbatches:
        ranks = (
            f"-n {nprocs} replicas" if stages == 1 else f"{replicas} replicas of {stages} stages"
        )
        raise LayoutError(
            f"{ranks} cannot share {microbatches} micro-batches; each needs at least one: use "
            f"-n {microbatches * stages} or fewer, or --microbatches {replicas} or more (which "
            "changes the results)"
        )


def _rank(recipe: str, given: dict[str, Any], folder: str, is_resumed: bool) -> dict[str, Any]:
    """Train on one rank."""
    from lockstep.launcher.run_folder import RESUME
    from lockstep.tools.recipes.digits import train

    os.environ.pop(RESUME, None)  # may be inherited from a script that starts this command
    if is_resumed:
        os.environ[RESUME] = "1"
    return train(resolve_options(recipe, given), folder)


def print_summary(summary: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Print the summary of the training; raise FileError if its record is incomplete."""
    failure = summary.pop("failure", None)
    if not (as_json and quiet):
        click.echo(_format_summary(summary), err=as_json)
    if as_json:
        click.echo(json.dumps(summary))
    if failure is not None:
        raise FileError(failure)


def _format_summary(summary: dict[str, Any]) -> str:
    """Return the summary of a run as text, with the digests at the end."""
    ranks = format_quantity(summary["world_size"], "rank")
    epochs = format_quantity(summary["epochs"], "epoch")
    rows = {
        "trained": f"{summary['recipe']} on {ranks}: {epochs}, "
        f"{summary['steps']} steps, {summary['samples']:,} samples",
        "accuracy": f"{summary['accuracy']:.2%} of {summary['held_out']:,} held-out samples, "
        f"loss {format_loss(summary['loss'])}",
        "resumed": f"after step {summary['resumed_from_step']}",
        "speed": f"{summary['samples_per_second']:,.0f} samples/s on average, "
        f"{summary['seconds']:.1f} s in all",
        "run": summary["run"],
        "optimizer": format_digest(summary["optimizer_digest"]),
        "digest": summary["digest"],
        "": "Digests of the optimizer state and of the weights, the same for every layout"
        + (" and every x86-64 processor with AVX2." if summary.get("portable") else "."),
    }
    omitted = {"resumed"} if summary["resumed_from_step"] is None else set()
    if not summary["samples_per_second"]:
        omitted.add("speed")  # the resumed run was already complete
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items() if name not in omitted)
