"""`lockstep plan`: the memory of a training in each storage, beside that of a host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lockstep.formatting import format_bytes
from lockstep.tools.commands.options import (
    PASSING_ARGUMENTS,
    json_option,
    printing_text,
    timeout_option,
)

if TYPE_CHECKING:
    from lockstep.tools.plan.memory_plan import StoragePlan

__all__ = ["command"]

COLUMNS = (
    "argument of ls.Trainer", "parameters", "gradients", "optimizer", "activations", "process",
    "per rank", "per host", "in memory", "network", "verdict",
)  # fmt: skip
OPTIONAL = (
    "in memory", "network", "process", "activations", "gradients", "parameters", "optimizer",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order."""

COMPUTED = (
    "The model does not fit on this host, so a step was computed without memory: workspaces of "
    "kernels, and memory that the allocator cannot use, are not counted."
)


@click.command(context_settings=PASSING_ARGUMENTS)
@click.option(
    "--hosts", default=1, show_default=True, metavar="H", type=click.IntRange(min=1),
    help="Number of hosts.",
)  # fmt: skip
@click.option(
    "--ranks", default=1, show_default=True, metavar="R", type=click.IntRange(min=1),
    help="Number of ranks on all hosts together.",
)  # fmt: skip
@timeout_option
@json_option
@click.argument("script", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    hosts: int, ranks: int, timeout: float, as_json: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Predict the memory that SCRIPT needs on R ranks of H hosts, in each storage.

    SCRIPT is run unchanged, with its ARGUMENTS, on one rank for a few training steps, which
    measure parameters, gradients, optimizer state and activations. If the model does not fit
    on this host, and is given as a list of callables or on the meta device, it is not built: a
    step is computed without memory. The ranks and the hosts of the plan need not exist.

    Hosts are taken to have the memory of this one. The traffic is that of a step: the bytes
    that a host sends to others, and that its ranks exchange in its memory.

    Options of this command may be placed before or after SCRIPT; other options are
    passed to the script. After "--", all options are passed to the script.

    Exit status: 0 a storage fits, 1 none fits, 2 usage error.
    """
    import psutil

    from lockstep.tools.plan.memory_measurement import measure_training
    from lockstep.tools.plan.memory_plan import choose, plan_storages

    if ranks % hosts:
        raise click.BadParameter(f"{ranks} ranks are not a multiple of {hosts} hosts")
    training = measure_training(script, arguments, ranks, timeout)
    memory = psutil.virtual_memory().total
    plans = plan_storages(training, hosts, ranks)
    chosen = choose(plans, memory)
    result = {
        "hosts": hosts,
        "ranks": ranks,
        "host_memory_bytes": memory,
        "measured": asdict(training),
        "storages": [_plain(plan, memory) for plan in plans],
        "choice": chosen and chosen.argument,
    }
    with printing_text(as_json, lambda: result):
        _print(plans, chosen, memory)
        if training.is_computed:
            click.echo(COMPUTED)
        start = f"lockstep run -n {ranks // hosts}{f' --nnodes {hosts}' if hosts > 1 else ''}"
        start += f" {shlex.join([script, *arguments])}"
        if training.is_exact and chosen is plans[0]:
            click.echo(f"The loop of ls.exact fits as it is. Start: {start}")
        else:
            click.echo(_advise(plans, chosen, memory, start))
    sys.exit(0 if chosen else 1)


def _plain(plan: StoragePlan, memory: int) -> dict[str, Any]:
    """Return the entry of a storage for `--json`."""
    computed = {name: getattr(plan, name) for name in ("argument", "rank", "host")}
    return {**asdict(plan), **computed, "fits": plan.fits(memory)}


def _print(plans: Sequence[StoragePlan], chosen: StoragePlan | None, memory: int) -> None:
    """Print the table."""
    from lockstep.tools.report.terminal import print_table

    rows = []
    for plan in plans:
        verdict = "chosen" if plan is chosen else "fits" if plan.fits(memory) else "too large"
        sizes = (
            plan.parameters, plan.gradients, plan.optimizer, plan.activations, plan.process,
            plan.rank, plan.host, plan.local, plan.network,
        )  # fmt: skip
        cells = [""] * len(sizes) if plan.refusal else list(map(format_bytes, sizes))
        rows.append([plan.argument, *cells, plan.refusal or verdict])
    click.echo(f"a host has {format_bytes(memory)}\n")
    print_table(COLUMNS, rows, OPTIONAL)
    click.echo()


def _advise(
    plans: Sequence[StoragePlan], chosen: StoragePlan | None, memory: int, start: str
) -> str:
    """Return what to write, or why no storage fits."""
    if chosen is not None:
        return f"Pass {chosen.argument} to ls.Trainer, and start: {start}"
    possible = [plan for plan in plans if not plan.refusal]
    if not possible:
        return (
            f"No storage can be used: {plans[0].refusal}. Use fewer ranks, or more micro-batches."
        )
    least = min(possible, key=lambda plan: plan.host)
    return (
        f"No storage fits: the smallest, {least.argument}, takes {format_bytes(least.host)} per "
        f"host, and a host has {format_bytes(memory)}. Use more hosts, smaller batches, or "
        "activation_checkpointing=True."
    )
