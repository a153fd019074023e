"""The summary of `lockstep train`, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """Return the summary of a run or an evaluation as text, with the digests at the end."""
    ranks = format_quantity(summary["world_size"], "rank")
    epochs = format_quantity(summary["epochs"], "epoch")
    is_training = summary["epochs"] > 0
    rows = {
        "trained": f"{summary['recipe']} on {ranks}: {epochs}, "
        f"{summary['steps']} steps, {summary['samples']:,} samples",
        "evaluated": f"{summary['recipe']} on {ranks}: {summary.get('weights')}",
        "accuracy": f"{_format_accuracy(summary)} of {summary['held_out']:,} held-out samples, "
        f"loss {format_loss(summary['loss'])}",
        "averaged": "",
        "resumed": f"after step {summary['resumed_from_step']}",
        "speed": f"{summary['samples_per_second']:,.0f} samples/s, {summary['seconds']:.1f} s",
        "run": summary["run"],
        "optimizer": summary.get("optimizer_digest"),
        "digest": f"{summary['digest']}",
        "": "Digests of the optimizer state and of the weights, the same for every layout"
        + (" and every x86-64 processor with AVX2." if summary.get("portable") else "."),
    }
    if "ema_loss" in summary:
        loss = format_loss(summary["ema_loss"])
        rows["averaged"] = f"{_format_accuracy(summary, 'ema_')} with averaged weights, loss {loss}"
    omitted = {"evaluated"} if is_training else {"trained", "optimizer", "", "run"}
    if "ema_loss" not in summary:
        omitted.add("averaged")
    if summary["resumed_from_step"] is None:
        omitted.add("resumed")
    if not summary["samples_per_second"]:
        omitted.add("speed")  # the resumed run was already complete
    return "\n".join(f"{name:<10} {value}" for name, value in rows.items() if name not in omitted)


def _format_accuracy(summary: Mapping[str, Any], prefix: str = "") -> str:
    """Return the accuracy, or the top-1 and top-5 accuracy, as percentages."""
    first, five = summary[f"{prefix}accuracy"], summary.get(f"{prefix}top5_accuracy")
    return f"{first:.2%}" if five is None else f"top-1 {first:.2%}, top-5 {five:.2%}"
