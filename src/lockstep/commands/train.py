"""`lockstep train`: a recipe on N ranks, with a live display and a digest at the end."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from lockstep.errors import FileError, LayoutError, UsageError
from lockstep.pipeline.schedules import NAMES

__all__ = ["command"]

RECIPES = ("digits", "mnist", "resnet50")
DECAYS = ("cosine", "none")
POSITIVE = click.IntRange(min=1)
NOT_NEGATIVE = click.FloatRange(min=0, max=float("inf"), max_open=True)


@click.command()
@click.argument("recipe", type=click.Choice(RECIPES))
@click.option("-n", "--nprocs", default=1, show_default=True, type=POSITIVE, help="Ranks to start.")
@click.option(
    "--microbatches", default=8, show_default=True, type=POSITIVE,
    help="Micro-batches of a global batch; part of the promise, not the number of ranks.",
)  # fmt: skip
@click.option(
    "--stages", default=1, show_default=True, type=POSITIVE,
    help="Ranks of a replica, each with its part of the model.",
)  # fmt: skip
@click.option(
    "--schedule", type=click.Choice(NAMES),
    help="Of a pipeline.  [default: the fastest, by measured costs]",
)  # fmt: skip
@click.option(
    "--activation-checkpointing", is_flag=True,
    help="Compute activations again in backward: less memory, more time, the same bits.",
)  # fmt: skip
@click.option("--epochs", type=POSITIVE, help="Times through the data.  [default: the recipe's]")
@click.option("--batch-size", type=POSITIVE, help="Samples of a global batch, over all ranks.")
@click.option("--lr", type=NOT_NEGATIVE, help="Learning rate of SGD.")
@click.option("--momentum", type=NOT_NEGATIVE, help="Momentum of SGD.")
@click.option("--weight-decay", type=NOT_NEGATIVE, help="Weight decay of SGD.")
@click.option("--warmup", type=NOT_NEGATIVE, help="Epochs over which the learning rate rises.")
@click.option("--lr-decay", type=click.Choice(DECAYS), help="How the learning rate falls.")
@click.option(
    "--label-smoothing", type=click.FloatRange(0, 1, max_open=True),
    help="Share of each label that goes to all classes.",
)  # fmt: skip
@click.option(
    "--size", type=click.IntRange(min=32),
    help="Width and height of pictures.  [resnet50: 224; 128 for generated ones]",
)  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
    help="Of weights, order and dropout.",
)  # fmt: skip
@click.option("--threads", default=1, show_default=True, type=POSITIVE, help="Threads a rank.")
@click.option(
    "--workers", default=0, show_default=True, type=click.IntRange(min=0),
    help="Loader processes a rank.",
)  # fmt: skip
@click.option("--bf16", is_flag=True, help="Mixed precision: bfloat16 by autocast.")
@click.option(
    "--data", metavar="DIR", help="Where the data is.  [mnist: data/mnist; resnet50: generated]"
)
@click.option("--download", is_flag=True, help="Fetch missing data from a public mirror.")
@click.option("--runs", default="runs", show_default=True, metavar="DIR", help="Folder of runs.")
@click.option("--name", metavar="NAME", help="The run's name.  [default: recipe, date and time]")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def command(
    recipe: str, nprocs: int, runs: str, name: str | None, as_json: bool, **given: Any
) -> None:
    """Train RECIPE on N ranks, as replicas or stages: the same bits for every layout.

    The run is recorded in runs/NAME; its weights are saved there.
    """
    _check_layout(nprocs, given["stages"], given["microbatches"], given["schedule"])
    from lockstep.launcher.launch import launch
    from lockstep.record.recorder import create_run_folder

    if recipe != "resnet50" and given["size"] is not None:
        raise UsageError(f"--size: the pictures of {recipe} have one size; leave it out")
    folder = Path(runs) / (name or create_run_folder(Path(runs), recipe))
    if given["download"]:
        _download(recipe, given["data"])
    elif recipe == "resnet50" and given["data"] is None:
        from lockstep.recipes.resnet50 import NOTICE

        click.echo(NOTICE, err=True)
    summary = launch(_rank, (recipe, given, str(folder)), nprocs)[0]
    failure = summary.pop("failure", None)
    click.echo(json.dumps(summary) if as_json else _told(summary))
    if failure is not None:
        raise FileError(failure)


def _check_layout(nprocs: int, stages: int, microbatches: int, schedule: str | None) -> None:
    """Raise LayoutError for ranks that do not make up whole replicas, or too many of them."""
    if nprocs % stages:
        raise LayoutError(
            f"-n {nprocs} ranks are no whole number of replicas of --stages {stages}: use "
            f"-n {stages} or a multiple of it"
        )
    if schedule and stages == 1:
        raise LayoutError(
            f"--schedule {schedule} is for a model in stages: add --stages 2 and -n 2, or leave "
            "it out"
        )
    replicas = nprocs // stages
    if replicas > microbatches:
        ranks = (
            f"-n {nprocs} replicas" if stages == 1 else f"{replicas} replicas of {stages} stages"
        )
        raise LayoutError(
            f"{ranks} cannot share {microbatches} micro-batches, each needs at least one: use "
            f"-n {microbatches * stages} or fewer, or --microbatches {replicas} or more (which "
            "changes the bits)"
        )


def _rank(recipe: str, given: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train on one rank."""
    from lockstep.recipes.classification import Options, train

    module = importlib.import_module(f"lockstep.recipes.{recipe}")
    chosen = {name: value for name, value in given.items() if value is not None}
    options = Options(recipe=recipe, **{"data": None, **module.defaults(chosen), **chosen})
    return train(options, module.load, module.network, folder)


def _download(recipe: str, data: str | None) -> None:
    """Fetch what the recipe's data lacks, once, before the ranks start."""
    if recipe == "resnet50":
        raise UsageError(
            "resnet50 trains on pictures of your own: there is nothing to download, give their "
            "folder with --data"
        )
    if recipe != "mnist":
        raise UsageError(f"{recipe} comes with Lockstep: there is nothing to download")
    from lockstep.data.datasets import mnist
    from lockstep.recipes.mnist import FOLDER

    for part in (True, False):
        mnist(data or FOLDER, train=part, download=True, progress=_received)


def _received(name: str, received: int, total: int | None) -> None:
    """Show how much of a file has come, on one line."""
    share = f"{received / total:4.0%}" if total else f"{received / 1e6:.1f} MB"
    end = "\n" if received == total else ""
    click.echo(f"\r{name}  {share}{end}", nl=False, err=True)


def _told(summary: dict[str, Any]) -> str:
    """Tell a person how the run ended; the digests last."""
    ranks = f"{summary['world_size']} rank" + ("s" if summary["world_size"] > 1 else "")
    rows = {
        "trained": f"{summary['recipe']} on {ranks}: {summary['epochs']} epochs, "
        f"{summary['steps']} steps, {summary['samples']:,} samples",
        "accuracy": f"{summary['accuracy']:.2%} of {summary['held_out']:,} held-out samples, "
        f"loss {summary['loss']:.4f}",
        "speed": f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s",
        "run": summary["run"],
        "optimizer": summary["optimizer_digest"],
        "digest": f"{summary['digest']}",
        "": "The digests are the same for every layout.",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items())
