"""The summary of `lockstep train`, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from lockstep.formatting import format_loss, format_quantity
from lockstep.kernel.errors import FileError

__all__ = ["print_summary"]


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
        "speed": f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s",
        "run": summary["run"],
        "optimizer": summary["optimizer_digest"],
        "digest": summary["digest"],
        "": "Digests of the optimizer state and of the weights, the same for every layout"
        + (" and every x86-64 processor with AVX2." if summary.get("portable") else "."),
    }
    omitted = {"resumed"} if summary["resumed_from_step"] is None else set()
    if not summary["samples_per_second"]:
        omitted.add("speed")  # the resumed run was already complete
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items() if name not in omitted)
