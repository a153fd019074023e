"""`lockstep train`: trains a recipe on N ranks, and prints a digest at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lockstep.errors import FileError, LayoutError, UsageError
from lockstep.files import replace_file
from lockstep.formatting import format_loss, format_quantity
from lockstep.launcher.environment import read_rank_info
from lockstep.launcher.rank_process import get_task
from lockstep.messages import JSON_HELP, say
from lockstep.pipeline.schedules import NAMES
from lockstep.record.loggers import LOGGER_NAMES

if TYPE_CHECKING:
    from lockstep.recipes.classification import Options
    from lockstep.record.reader import Run

__all__ = ["command"]

RECIPES = ("digits", "mnist", "resnet50")
DECAYS = ("cosine", "none")
POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.FloatRange(min=0, max=float("inf"), max_open=True)
CHANGEABLE = {"stages", "schedule", "activation_checkpointing", "workers", "logger"}
CHANGEABLE |= {"checkpoint_every", "quiet", "download"}  # on resuming, because they change no bits
NOT_RECALLED = {"quiet", "download"}  # apply to one process, not to the run
SUMMARY_FILE = "summary.json"  # the summary of a run whose ranks are processes of `lockstep run`
RECIPE_FILE = "recipe.json"  # the options of a run, until its record has the first line


@click.command()
@click.argument("recipe", type=click.Choice(RECIPES), required=False)
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
@click.option(
    "--schedule", type=click.Choice(NAMES),
    help="Pipeline schedule.  [default: the fastest, by measured costs]",
)  # fmt: skip
@click.option(
    "--activation-checkpointing", is_flag=True,
    help="Recompute activations in backward: less memory, more time, the same bits.",
)  # fmt: skip
@click.option(
    "--epochs",
    type=POSITIVE,
    help="Number of epochs.  [default: digits 30, mnist 10, resnet50 90; 2 if generated]",
)
@click.option(
    "--batch-size",
    type=POSITIVE,
    help="Samples per global batch, over all ranks.  "
    "[default: digits 32, mnist 128, resnet50 256; 32 if generated]",
)
@click.option(
    "--lr",
    type=NOT_NEGATIVE,
    help="Learning rate of SGD.  [default: 0.05; resnet50: 0.1 per 256 samples]",
)
@click.option(
    "--momentum", type=NOT_NEGATIVE, help="Momentum of SGD.  [default: 0.5; resnet50: 0.9]"
)
@click.option(
    "--weight-decay", type=NOT_NEGATIVE, help="Weight decay of SGD.  [default: 0; resnet50: 1e-4]"
)
@click.option(
    "--warmup", type=NOT_NEGATIVE,
    help="Epochs of linear learning-rate warmup.  [default: 0; resnet50: 1/18 of the epochs]",
)  # fmt: skip
@click.option(
    "--lr-decay", type=click.Choice(DECAYS),
    help="Learning-rate decay after the warmup.  [default: none; resnet50: cosine]",
)  # fmt: skip
@click.option(
    "--label-smoothing", type=click.FloatRange(0, 1, max_open=True),
    help="Label smoothing, from 0 to 1.  [default: 0; resnet50: 0.1]",
)  # fmt: skip
@click.option(
    "--size", type=click.IntRange(min=32),
    help="Width and height of images in pixels.  [default: resnet50 224; 128 if generated]",
)  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
    help="Random seed for initialization, shuffling and dropout.",
)  # fmt: skip
@click.option("--threads", default=1, show_default=True, type=POSITIVE, help="Threads per rank.")
@click.option(
    "--workers", default=0, show_default=True, type=click.IntRange(min=0),
    help="Loader processes per rank.",
)  # fmt: skip
@click.option("--bf16", is_flag=True, help="Mixed precision with bfloat16 autocast.")
@click.option(
    "--data",
    metavar="DIR",
    help="Folder of the data.  [default: mnist data/mnist; resnet50 generated images]",
)
@click.option("--download", is_flag=True, help="Download missing data from a public mirror.")
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
@click.option(
    "--logger", multiple=True, type=click.Choice(LOGGER_NAMES),
    help="Also log to this dashboard; repeatable.  [default: none]",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help=JSON_HELP,
)
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
    --schedule, --activation-checkpointing, --workers, --logger and --checkpoint-every
    may differ.

    --min A --max B makes an elastic run: when a rank is killed, the run continues, with the same
    bits.

    In a rank of `lockstep run -m lockstep train RECIPE ...` this process trains as that rank, and
    the run is that of the launch.

    Exit status: 0 success, 1 the training failed, 2 usage error, 75 stopped on request
    after saving a checkpoint, 128+N ended by signal N.
    """
    is_rank = get_task() is not None
    resumed = None
    if resume is not None:
        if is_rank:
            raise UsageError(
                "--resume is an option of the launch here: lockstep run --resume RUN -m lockstep "
                "train RECIPE ..."
            )
        resumed = _open_resumed(resume, runs)
        recipe, nprocs = _recall_options(resumed, recipe, name, nprocs, given)
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'; or continue a run with --resume RUN.")
    if is_rank:
        nprocs = read_rank_info(os.environ).world_size
    elif most is not None:
        nprocs = most
    _check_layout(nprocs, given["stages"], given["microbatches"], given["schedule"])
    from lockstep.launcher.failure_attribution import STOPPED
    from lockstep.launcher.fork_server import get_fork_server
    from lockstep.launcher.launch import launch
    from lockstep.launcher.run_folder import create_run_folder, name_run
    from lockstep.record.loggers import create_logger

    if recipe != "resnet50" and given["size"] is not None:
        raise UsageError(f"--size: the images of {recipe} have a fixed size; omit this option")
    for each in given["logger"]:
        create_logger(each, Path(runs))  # report a missing package before the ranks start
    if given["data"] is not None:
        given["data"] = os.path.abspath(given["data"])  # valid in any directory
    if is_rank:
        _train_in_rank(recipe, given, as_json)
        return
    is_elastic = least is not None or most is not None
    if resumed is not None:
        folder = resumed.folder
    elif is_elastic:
        folder = Path(runs) / (name or name_run(recipe))  # the launch creates the folder
    else:
        folder = Path(runs) / name if name else create_run_folder(Path(runs), recipe)
    if given["download"]:
        _download(recipe, given["data"])
    elif recipe == "resnet50" and given["data"] is None:
        from lockstep.recipes.resnet50 import NOTICE

        click.echo(NOTICE, err=True)
    if is_elastic:
        words = _list_words(recipe, given)
        summary = _train_elastic(words, nprocs, least or 1, folder, resumed is not None)
        _print_summary(summary, given["quiet"], as_json)
        return
    if resumed is None:
        _store_options(folder, recipe, nprocs, given)
    get_fork_server(for_training=True)  # otherwise every rank would import torch._dynamo
    try:
        summary = launch(_rank, (recipe, given, str(folder), resumed is not None), nprocs)[0]
    except SystemExit as stop:
        if stop.code == STOPPED:
            say(f"continue with: {shlex.join(['lockstep', 'train', '--resume', str(folder)])}")
        raise
    _print_summary(summary, given["quiet"], as_json)


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
    if given["download"]:
        raise UsageError(
            f"--download: the ranks would download the data at the same time; run `lockstep train "
            f"{recipe} --download` once without a launch"
        )
    summary = _rank(recipe, given, os.path.relpath(folder), is_resuming())
    if rank() == 0:
        with replace_file(folder / SUMMARY_FILE) as file:
            file.write(json.dumps(summary).encode())
        _print_summary(summary, given["quiet"], as_json)


def _list_words(recipe: str, given: Mapping[str, Any]) -> list[str]:
    """Return the command line of a rank that trains with these options."""
    words = ["train", recipe]
    for option in command.params:
        value = given.get(option.name or "")
        if option.name == "download" or value in (None, False, ()) or value == option.default:
            continue
        name = option.opts[-1]
        if value is True:
            words.append(name)
        else:
            for each in value if isinstance(value, (tuple, list)) else (value,):
                words += [name, str(each)]
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
    from lockstep.elastic.rounds import Rounds
    from lockstep.launcher.launch_config import LaunchConfig
    from lockstep.launcher.launch_script import Interrupted
    from lockstep.launcher.supervisor import RankSupervisor

    folders: list[Path] = []

    def watch(ranks: RankSupervisor, rounds: Rounds, launched: Path | None) -> None:
        folders.append(folder if launched is None else launched)

    every_rank = range(nprocs)
    config = LaunchConfig(
        target="lockstep",
        arguments=tuple(words),
        kind="module",
        nprocs=nprocs,
        min_nprocs=least,
        log_dir=str(folder.parent),
        name=None if is_resumed else folder.name,
        resumed_run=folder if is_resumed else None,
        redirects=dict.fromkeys(every_rank, 1),  # this process prints the summary
        tee=dict.fromkeys(every_rank, 0),
    )
    try:
        if status := launch_elastic(config, watch):
            sys.exit(status)
    except Interrupted as interruption:
        sys.exit(interruption.exit_status)
    summary: dict[str, Any] = json.loads((folders[-1] / SUMMARY_FILE).read_bytes())
    return summary


def _print_summary(summary: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Print the summary of the training; raise FileError if its record is incomplete."""
    failure = summary.pop("failure", None)
    if not (as_json and quiet):
        click.echo(_format_summary(summary), err=as_json)
    if as_json:
        click.echo(json.dumps(summary))
    if failure is not None:
        raise FileError(failure)


def _open_resumed(run: str, runs: str) -> Run:
    """Return the run to resume, once no other process uses it.

    Raises:
        UsageError: There is no such run, it is not a run of a recipe, or it is still running.
    """
    from lockstep.launcher.run_folder import find_run, wait_until_free

    folder = find_run(run, Path(runs))
    _read_recorded(folder)
    wait_until_free(folder)
    return _read_recorded(folder)


def _read_recorded(folder: Path) -> Run:
    """Return a run with its options; raise UsageError if it is not a run of a recipe."""
    from lockstep.record.columns import as_dict
    from lockstep.record.reader import read_ends
    from lockstep.record.recorder import RECORD_FILE

    has_record = (folder / RECORD_FILE).exists()
    found = read_ends(folder) if has_record else None
    if found is None or not found.header:  # killed before the record had a line
        found = _load_options(folder) or read_ends(folder)
    if as_dict(found.latest("options")).get("recipe") not in RECIPES:
        raise UsageError(
            f"{folder} is not a run of `lockstep train`, so its options are not known; continue "
            f"a run of a script with `lockstep run --resume {folder}`"
        )
    return found


def _store_options(folder: Path, recipe: str, nprocs: int, given: dict[str, Any]) -> None:
    """Store the recipe and options of a run before its ranks start.

    The record begins when all ranks have connected. Without this file, a run that is killed before
    that could not be resumed.
    """
    from lockstep.files import make_folder
    from lockstep.record.recorder import RECORD_FILE
    from lockstep.redaction import redact

    content = {"recipe": recipe, "nprocs": nprocs, "options": redact(given)}
    with contextlib.suppress(OSError):  # the recorder reports what is wrong with the folder
        make_folder(folder)
        if not (folder / RECORD_FILE).exists():
            with replace_file(folder / RECIPE_FILE) as file:
                file.write(json.dumps(content).encode())


def _load_options(folder: Path) -> Run | None:
    """Return a run with only the options that `_store_options` stored; None if there are none."""
    from lockstep.record.columns import concatenate_blocks
    from lockstep.record.reader import Run

    try:
        stored = json.loads((folder / RECIPE_FILE).read_bytes())
        options = dataclasses.asdict(_resolve_options(stored["recipe"], stored["options"]))
        header = {"options": options, "layout": {"world_size": int(stored["nprocs"])}}
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
    return Run(folder=folder, header=header, steps=concatenate_blocks([]))


def _resolve_options(recipe: str, given: Mapping[str, Any]) -> Options:
    """Return the options with the recipe's defaults."""
    from lockstep.recipes.classification import Options

    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe}")
    module = importlib.import_module(f"lockstep.recipes.{recipe}")
    chosen = {name: value for name, value in given.items() if value is not None}
    return Options(recipe=recipe, **{"data": None, **module.defaults(chosen), **chosen})


def _recall_options(
    run: Run, recipe: str | None, name: str | None, nprocs: int, given: dict[str, Any]
) -> tuple[str, int]:
    """Add the recorded options of a run to `given`, unless they were given.

    Returns:
        The recipe and the number of ranks.

    Raises:
        UsageError: An option that decides the results was given with another value.
    """
    context = click.get_current_context()
    recorded: dict[str, Any] = run.latest("options")
    for option in given.keys() - CHANGEABLE - recorded.keys():
        raise UsageError(
            f"{run.folder} cannot be resumed: its record has no option {option}, which decides "
            f"the results; start a new run"
        )
    asked = {"recipe": recipe, "name": name, **given}
    for parameter in context.command.params:
        option = parameter.name or ""
        is_given = context.get_parameter_source(option) is not ParameterSource.DEFAULT
        if option == "name":
            recorded = recorded | {"name": run.folder.resolve().name}
        if is_given and option in asked and option not in CHANGEABLE:
            _require_same(run, parameter, asked[option], recorded.get(option))
        if not is_given and option in given and option in recorded and option not in NOT_RECALLED:
            given[option] = recorded[option]
    if given["stages"] == 1 and context.get_parameter_source("schedule") is ParameterSource.DEFAULT:
        given["schedule"] = None
    if context.get_parameter_source("nprocs") is ParameterSource.DEFAULT:
        nprocs = int(run.layout.get("world_size") or nprocs)
    return recorded["recipe"], nprocs


def _require_same(run: Run, parameter: click.Parameter, value: Any, recorded: Any) -> None:
    """Raise UsageError unless an option of a resumed run has its recorded value."""
    if parameter.name == "data" and None not in (value, recorded):
        value, recorded = os.path.abspath(value), os.path.abspath(recorded)
    if value == recorded:
        return
    option = parameter.opts[-1] if isinstance(parameter, click.Option) else "RECIPE"
    if value is True:
        asked, had = option, f"without {option}"
    else:
        asked = f"{option} {value}"
        had = f"with {option} {recorded}" if recorded is not None else f"without {option}"
    raise UsageError(
        f"{asked}: the run {run.folder} was started {had}, which a resumed run keeps; omit it, "
        f"or start a new run"
    )


def _check_layout(nprocs: int, stages: int, microbatches: int, schedule: str | None) -> None:
    """Raise LayoutError unless the ranks form whole replicas with a micro-batch each."""
    if nprocs % stages:
        raise LayoutError(f"-n {nprocs} must be a multiple of --stages {stages}")
    if schedule and stages == 1:
        raise LayoutError(
            f"--schedule {schedule} needs pipeline stages: add --stages 2 and -n 2, or omit it"
        )
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
    from lockstep.recipes.classification import train

    os.environ.pop(RESUME, None)  # may be inherited from a script that starts this command
    if is_resumed:
        os.environ[RESUME] = "1"
    module = importlib.import_module(f"lockstep.recipes.{recipe}")
    return train(_resolve_options(recipe, given), module.load, module.network, folder)


def _download(recipe: str, data: str | None) -> None:
    """Download missing data of the recipe once, before the ranks start."""
    if recipe == "resnet50":
        raise UsageError(
            "--download: resnet50 trains on your own images; pass their folder with --data"
        )
    if recipe != "mnist":
        raise UsageError(
            f"--download: {recipe} is part of Lockstep, so there is nothing to download"
        )
    from lockstep.data.datasets import mnist
    from lockstep.recipes.mnist import FOLDER

    for part in (True, False):
        mnist(data or FOLDER, train=part, download=True, progress=_show_download)


def _show_download(name: str, received: int, total: int | None) -> None:
    """Show the progress of a download on one line."""
    share = f"{received / total:4.0%}" if total else f"{received / 1e6:.1f} MB"
    end = "\n" if received == total else ""
    click.echo(f"\r{name}  {share}{end}", nl=False, err=True)


def _format_summary(summary: dict[str, Any]) -> str:
    """Return the summary of the run as text, with the digests at the end."""
    ranks = format_quantity(summary["world_size"], "rank")
    epochs = format_quantity(summary["epochs"], "epoch")
    rows = {
        "trained": f"{summary['recipe']} on {ranks}: {epochs}, "
        f"{summary['steps']} steps, {summary['samples']:,} samples",
        "accuracy": f"{summary['accuracy']:.2%} of {summary['held_out']:,} held-out samples, "
        f"loss {format_loss(summary['loss'])}",
        "resumed": f"after step {summary['resumed_from_step']}",
        "speed": f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s",
        "run": summary["run"],
        "optimizer": summary["optimizer_digest"],
        "digest": f"{summary['digest']}",
        "": "Digests of the optimizer state and of the weights, the same for every layout.",
    }
    if summary["resumed_from_step"] is None:
        del rows["resumed"]
    if not summary["samples_per_second"]:
        del rows["speed"]  # the resumed run was already complete
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())
