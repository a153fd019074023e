"""Runs compared: speed, digests, where losses part, which tensor differs, what else differs.

The first run is the one that the others are compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import lockstep
from lockstep.errors import FileError
from lockstep.formatting import format_duration, format_metric, format_number
from lockstep.messages import escape_control
from lockstep.record.reader import Run
from lockstep.report.chart import overlaid
from lockstep.report.markdown import table as markdown_table
from lockstep.report.markdown import text
from lockstep.report.page import panel, render
from lockstep.report.settings import command, flattened, shown
from lockstep.report.significance import Verdict, compare_paces, pace
from lockstep.report.summary import Summary, summarise
from lockstep.report.summary_text import STATES
from lockstep.report.weights import common_weights, first_difference

__all__ = ["Against", "Comparison", "Parting", "compare", "html", "markdown"]


@dataclass(frozen=True)
class Parting:
    """Where the losses of two runs part: the first step that differs, with both losses.

    `step` is None where all `compared` steps have the same loss, bit for bit.
    """

    compared: int
    step: int | None = None
    ours: float = math.nan
    theirs: float = math.nan


@dataclass(frozen=True)
class Against:
    """One run against the first: `speed`, `parting`, and sentences that say it all."""

    name: str
    verdict: Verdict
    same_digest: bool | None
    parting: Parting
    sentences: list[str]


@dataclass(frozen=True)
class Comparison:
    """Some runs, each but the first against the first, and what differs in their settings."""

    runs: list[Run]
    names: list[str]
    summaries: list[Summary]
    speeds: list[float]
    against: list[Against]
    settings: dict[str, list[str]]


def compare(runs: list[Run]) -> Comparison:
    """Compare `runs` (at least two) with the first of them."""
    names = distinct([run.name for run in runs], [str(run.folder) for run in runs])
    paces = [pace(run) for run in runs]
    against = []
    for run, name, theirs in list(zip(runs, names, paces, strict=True))[1:]:
        verdict = compare_paces(paces[0], theirs)
        parting = parting_of(runs[0], run)
        same = same_digest(runs[0], run)
        sentences = [
            speed_sentence(names[0], name, verdict),
            digest_sentence(names[0], name, same),
            *parting_sentences(parting),
            *weights_sentences(runs[0], run),
        ]
        against.append(Against(name, verdict, same, parting, sentences))
    return Comparison(
        runs, names, list(map(summarise, runs)), [one.speed for one in paces], against,
        settings(runs),
    )  # fmt: skip


def distinct(names: list[str], folders: list[str]) -> list[str]:
    """Return the runs' names, or their folders where names are the same."""
    return names if len(set(names)) == len(names) else folders


def parting_of(first: Run, second: Run) -> Parting:
    """Find the first step at which the losses of two runs part."""
    _, ours, theirs = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    a, b = first.steps.loss[ours], second.steps.loss[theirs]
    apart = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if not len(apart):
        return Parting(len(ours))
    at = apart[0]
    return Parting(len(ours), int(first.steps.step[ours[at]]), float(a[at]), float(b[at]))


def same_digest(first: Run, second: Run) -> bool | None:
    """Whether two runs end in the same weights; None where one of them has no digest."""
    digests = [(run.end or {}).get("digest") for run in (first, second)]
    return digests[0] == digests[1] if all(digests) else None


def speed_sentence(first: str, second: str, verdict: Verdict) -> str:
    """Say which run is faster, or that nothing can be said."""
    if not verdict.known:
        return f"{second} and {first} have too few steps to tell which is faster."
    span = f"95% interval {factor(verdict.low)} to {factor(verdict.high)}"
    if not verdict.significant:
        return f"{second} and {first} do not differ significantly in speed ({span})."
    much = verdict.ratio if verdict.ratio > 1 else 1 / verdict.ratio
    faster, slower = (second, first) if verdict.ratio > 1 else (first, second)
    if verdict.ratio < 1:
        span = f"95% interval {factor(1 / verdict.high)} to {factor(1 / verdict.low)}"
    return f"{faster} is {factor(much)} times as fast as {slower} ({span})."


def factor(value: float) -> str:
    """Return a ratio with the digits that it deserves."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def digest_sentence(first: str, second: str, same: bool | None) -> str:
    """Say whether two runs end in the same weights."""
    if same is None:
        return "Digests cannot be compared: not every run reached its end."
    if same:
        return f"{second} and {first} end in the same weights, bit for bit: the digests agree."
    return f"{second} and {first} end in different weights: the digests differ."


def parting_sentences(parting: Parting) -> list[str]:
    """Say from which step on the losses differ."""
    if not parting.compared:
        return ["They have no steps in common, so their losses cannot be compared."]
    if parting.step is None:
        return [f"Their losses are the same bits at all {parting.compared:,} common steps."]
    return [
        f"Their losses part at step {parting.step:,}: {parting.ours!r} and {parting.theirs!r}"
        f" ({parting.compared:,} steps compared)."
    ]


def weights_sentences(first: Run, second: Run) -> list[str]:
    """Say which tensor of the kept weights differs first; nothing where they kept none."""
    name = common_weights(first.folder, second.folder)
    if name is None:
        return []
    try:
        found = first_difference(first.folder / name, second.folder / name)
    except FileError as error:
        return [f"The kept weights cannot be compared: {error}."]
    if found is None:
        return [f"Their weights in {name} are the same bytes, tensor by tensor."]
    others = f"; {found.count} of {found.total} tensors differ" if found.count > 1 else ""
    what = f"In {name} the first tensor that differs is {found.tensor}: it {found.how}{others}."
    return [escape_control(what)]


def settings(runs: list[Run]) -> dict[str, list[str]]:
    """Return what differs in command, layout, options, model and environment."""
    each = [flat_settings(run) for run in runs]
    names = dict.fromkeys(name for found in each for name in found)
    table = {name: [found.get(name, "") for found in each] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def flat_settings(run: Run) -> dict[str, str]:
    """Return everything that the record says a run was started with."""
    found: dict[str, str] = {"command": command(run)}
    for part in ("layout", "options", "model", "environment"):
        value: Any = run.header.get(part)
        if isinstance(value, dict):
            found |= dict(flattened(value, "" if part == "environment" else f"{part}."))
    for name in ("recipe", "epochs", "steps_per_epoch", "samples"):
        if name in run.header:
            found[name] = shown(run.header[name])
    return found


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the runs' figures side by side: column names and rows of text."""
    metrics = list(dict.fromkeys(name for one in comparison.summaries for name in one.metrics))
    names = ["run", "state", "layout", *metrics, "loss", "samples/s", "a step", "digest"]
    rows = []
    for name, one, speed in zip(
        comparison.names, comparison.summaries, comparison.speeds, strict=True
    ):
        values = (one.metrics.get(metric, math.nan) for metric in metrics)
        cells = [
            format_metric(m, v).removeprefix(m + " ") for m, v in zip(metrics, values, strict=True)
        ]
        loss = f"{one.loss:.4f}" if math.isfinite(one.loss) else "?"
        figures = [*cells, loss, format_number(speed), format_duration(one.step_seconds)]
        rows.append([name, STATES[one.state], one.layout, *figures, one.digest[:12]])
    return names, rows


def html(comparison: Comparison) -> str:
    """Return the comparison as one self-contained HTML page."""
    names, rows = table(comparison)
    return render(
        "compare.html",
        comparison=comparison,
        names=names,
        rows=rows,
        remarks=[remark for run in comparison.runs for remark in run.remarks],
        panels=[panel(chart) for chart in overlaid(comparison.runs, comparison.names)],
        version=lockstep.__version__,
    )


def markdown(comparison: Comparison) -> str:
    """Return the comparison in Markdown."""
    names, rows = table(comparison)
    lines = [f"## {text(' and '.join(comparison.names))}", ""]
    lines += [f"- {text(sentence)}" for one in comparison.against for sentence in one.sentences]
    lines += ["", *markdown_table(names, rows)]
    if comparison.settings:
        settings = [[name, *values] for name, values in comparison.settings.items()]
        lines += ["", *markdown_table(("differs", *comparison.names), settings)]
    return "\n".join(lines) + "\n"


def plain(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain values, for JSON."""
    runs = [
        {"name": name, "samples_per_second": finite(speed), "digest": one.digest}
        for name, one, speed in zip(
            comparison.names, comparison.summaries, comparison.speeds, strict=True
        )
    ]
    against = [
        {
            "name": one.name,
            "speed_ratio": finite(one.verdict.ratio),
            "interval": [finite(one.verdict.low), finite(one.verdict.high)],
            "chance": one.verdict.chance,
            "significant": one.verdict.significant,
            "same_digest": one.same_digest,
            "steps_compared": one.parting.compared,
            "losses_part_at": one.parting.step,
            "sentences": one.sentences,
        }
        for one in comparison.against
    ]
    return {"runs": runs, "against": against, "differs": comparison.settings}


def finite(value: float) -> float | None:
    """Return a number, or None where there is none."""
    return value if math.isfinite(value) else None
