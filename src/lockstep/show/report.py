"""The report of one run: its facts in words and figures, as a page or as Markdown.

Run ──> facts(run) ──┬─> html(run)       one self-contained page
                     └─> markdown(run)   for an issue
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from lockstep.show import words
from lockstep.show.chart import curves
from lockstep.show.page import panel, render
from lockstep.show.reading import PARTS, Run, mapping
from lockstep.show.record import FILE
from lockstep.show.summary import (
    Summary,
    last_time,
    many,
    real,
    reals,
    slowest_rank,
    slowest_step,
    summarise,
    text,
)

__all__ = ["command", "findings", "headline", "html", "markdown", "trouble"]

STATES = {"done": "done", "failed": "failed", "running": "still running", "died": "died"}
RANKS = 32  # ranks drawn at most
EPOCHS = 60  # epochs listed at most
WARNINGS = 50  # warnings listed at most


def html(run: Run) -> str:
    """Return the report of `run` as one self-contained HTML page."""
    summary = summarise(run)
    charts = {chart.key: panel(chart) for chart in curves(run)}
    split = rank_splits(run)
    return render(
        "report.html",
        summary=summary,
        state_word=STATES[run.state],
        headline=headline(run, summary),
        trouble=trouble(run, summary),
        remarks=run.remarks,
        tiles=tiles(run, summary),
        pace=charts.pop("seconds", None),
        curves=list(charts.values()),
        findings=findings(run),
        split=split[:RANKS],
        hidden_ranks=max(0, len(split) - RANKS),
        total_shares=shares(run),
        memory=memory(run),
        epochs=epoch_table(run),
        warnings=[warning(line) for line in run.warnings[:WARNINGS]],
        hidden_warnings=max(0, len(run.warnings) - WARNINGS),
        command=command(run),
        facts=facts(run),
        version=lockstep.__version__,
        path=str(Path(run.folder.name) / FILE),
    )


def headline(run: Run, summary: Summary) -> list[str]:
    """Say in two sentences what was trained and how well, and where and how fast."""
    return [how_well(run, summary), where_and_how_fast(run, summary)]


def how_well(run: Run, summary: Summary) -> str:
    """Return the first sentence: "digits: accuracy 97.2%, loss 0.0931 on held-out samples ..."."""
    what = summary.recipe or text(mapping(run.header.get("model")).get("class")) or summary.name
    planned = real(run.header.get("epochs"))
    after = many(summary.epochs, "epoch")
    if planned > summary.epochs:
        after = f"{summary.epochs} of {many(planned, 'epoch')}"
    found = [words.metric(*item) for item in summary.metrics.items() if math.isfinite(item[1])]
    found += [f"loss {summary.loss:.4f}"] if math.isfinite(summary.loss) else []
    if not found:
        return f"{what}: no step was recorded."
    place = "on held-out samples" if summary.held_out else "in training"
    return f"{what}: {', '.join(found)} {place} after {after}."


def where_and_how_fast(run: Run, summary: Summary) -> str:
    """Return the second sentence: model, layout, samples, time, speed."""
    model = mapping(run.header.get("model"))
    parts = []
    if model.get("class"):
        size = real(model.get("parameters"))
        of = f" of {words.count(size)} parameters" if math.isfinite(size) else ""
        parts.append(f"{model['class']}{of}")
    parts += [f"on {summary.layout}"] if summary.layout else []
    sentence = " ".join(parts)
    work = f"{words.count(summary.samples)} samples in {many(summary.steps, 'step')}"
    sentence += f": {work}" if sentence else work
    sentence += f" took {words.duration(summary.seconds)}" if summary.seconds > 0 else ""
    if math.isfinite(summary.speed):
        sentence += f", {words.rate(summary.speed)} samples/s while stepping"
    return sentence + "."


def trouble(run: Run, summary: Summary) -> str:
    """Say what became of a run that is not done; nothing for one that is."""
    at = words.duration(last_time(run))
    place = ""
    if len(run.steps):
        place = f", in epoch {run.steps.epoch[-1] + 1:.0f}, step {run.steps.step[-1]:,.0f}"
    return {
        "done": "",
        "failed": summary.message or "The run failed, and its record does not say why.",
        "running": f"This run is still going; this is how it stood {at} after its start{place}.",
        "died": f"This run left no end: its last line came {at} after its start{place}. "
        f"It was killed, or its machine went down.",
    }[run.state]


@dataclass(frozen=True)
class Tile:
    """One key figure and its name."""

    name: str
    value: str


def tiles(run: Run, summary: Summary) -> list[Tile]:
    """Return the key figures."""
    place = "held out" if summary.held_out else "training"
    metrics = [
        Tile(
            f"{name}, {place}", words.percent(value) if words.is_share(name) else words.short(value)
        )
        for name, value in list(summary.metrics.items())[:2]
    ]
    figures = [
        Tile(f"loss, {place}", f"{summary.loss:.4f}" if math.isfinite(summary.loss) else "?"),
        Tile("samples a second", words.rate(summary.speed)),
        Tile("a step (median)", words.duration(summary.step_seconds)),
        Tile("the whole run", words.duration(summary.seconds)),
    ]
    return metrics + figures


def findings(run: Run) -> list[str]:
    """Say what stands out in the times: the slowest rank, the slowest step."""
    found = []
    rank, step = slowest_rank(run), slowest_step(run)
    if rank is not None:
        found.append(
            f"Rank {rank.rank} is the slowest: it works {words.duration(rank.seconds)} a step, "
            f"{words.percent(rank.excess)} more than the ranks' mean, and the others wait for it."
        )
    elif run.steps.ranks.shape[1] > 1:
        found.append("No rank stands out as slow.")
    if step is not None and len(run.steps) > 1:
        much = f", {words.short(step.medians)} times the median" if step.medians > 1.5 else ""
        cause = (
            f"; most of the excess is {step.part} on rank {step.rank}" if much and step.part else ""
        )
        found.append(
            f"The slowest step is {step.step:,} (epoch {step.epoch + 1}): "
            f"{words.duration(step.seconds)}{much}{cause}."
        )
    return found


@dataclass(frozen=True)
class RankSplit:
    """How one rank's time splits; `length` is its time as a share of the longest rank's."""

    rank: int
    seconds: float
    length: float
    shares: dict[str, float]

    @property
    def words(self) -> str:
        """The split as a phrase."""
        return ", ".join(f"{name} {words.percent(share)}" for name, share in self.shares.items())


def rank_splits(run: Run) -> list[RankSplit]:
    """Return the split of each rank's time; where they are too many, the busiest come first."""
    totals = np.nansum(run.steps.ranks, axis=0)
    longest = totals.sum(axis=1).max(initial=0.0)
    if not longest > 0:
        return []
    found = []
    for rank, row in enumerate(totals):
        whole = float(row.sum())
        parts = (row / whole if whole else row).tolist()
        split = dict(zip(PARTS, parts, strict=True))
        found.append(RankSplit(rank, whole, whole / float(longest), split))
    if len(found) > RANKS:
        found.sort(key=lambda one: -one.seconds * one.shares["compute"])
    return found


def shares(run: Run) -> dict[str, float]:
    """Return how the time of all ranks together splits; empty where nothing is known."""
    totals = np.nansum(run.steps.ranks, axis=(0, 1))
    whole = totals.sum()
    return dict(zip(PARTS, (totals / whole).tolist(), strict=True)) if whole > 0 else {}


@dataclass(frozen=True)
class RankMemory:
    """Peak resident bytes of a rank, and as a share of the highest."""

    rank: int
    octets: float
    share: float


def memory(run: Run) -> list[RankMemory]:
    """Return each rank's peak memory over the epochs."""
    peaks: dict[int, float] = {}
    for line in run.epochs:
        values = line.get("memory_bytes")
        for rank, value in enumerate(values if isinstance(values, list) else []):
            peaks[rank] = max(peaks.get(rank, 0.0), real(value, 0.0))
    highest = max(peaks.values(), default=0.0)
    found = [RankMemory(rank, peak, peak / highest) for rank, peak in peaks.items() if highest]
    return sorted(found, key=lambda one: -one.octets)[:RANKS] if len(found) > RANKS else found


@dataclass(frozen=True)
class EpochTable:
    """The epochs as rows of text; `hidden` counts those left out in the middle."""

    names: list[str]
    rows: list[list[str]]
    hidden: int


def epoch_table(run: Run) -> EpochTable:
    """Return the table of epochs; of very many, the first and the last."""
    lines = run.epochs
    if len(lines) > EPOCHS:
        lines = lines[: EPOCHS // 2] + lines[-EPOCHS // 2 :]
    metrics = list(dict.fromkeys(name for line in lines for name in reals(line.get("metrics"))))
    held_out = any(isinstance(line.get("evaluation"), dict) for line in lines)
    extra = ["held-out loss", *(f"held-out {name}" for name in metrics)] if held_out else []
    names = ["epoch", "loss", *metrics, *extra, "samples/s", "time"]
    rows = [epoch_row(line, metrics, held_out) for line in lines]
    return EpochTable(names, rows, len(run.epochs) - len(lines))


def epoch_row(line: dict[str, Any], metrics: list[str], held_out: bool) -> list[str]:
    """Return one epoch as text."""
    evaluation = mapping(line.get("evaluation"))
    seconds = real(line.get("seconds"))
    row = [f"{real(line.get('epoch')) + 1:.0f}", *quality_cells(line, metrics)]
    row += quality_cells(evaluation, metrics) if held_out else []
    speed = real(line.get("samples")) / seconds if seconds > 0 else math.nan
    return [*row, words.rate(speed), words.duration(seconds)]


def quality_cells(line: dict[str, Any], metrics: list[str]) -> list[str]:
    """Return a loss and metrics as text."""
    loss, values = real(line.get("loss")), reals(line.get("metrics"))
    cells = [f"{loss:.4f}" if math.isfinite(loss) else ""]
    for name in metrics:
        value = values.get(name, math.nan)
        shown = words.percent(value) if words.is_share(name) else words.short(value)
        cells.append(shown if math.isfinite(value) else "")
    return cells


def warning(line: dict[str, Any]) -> str:
    """Return a warning's line as a sentence."""
    at, rank = real(line.get("t")), line.get("rank")
    when = f"after {words.duration(at)}" if math.isfinite(at) else ""
    who = "" if rank is None else f"rank {rank}"
    place = ", ".join(filter(None, (who, when)))
    return f"{place}: {text(line.get('message'))}" if place else text(line.get("message"))


def command(run: Run) -> str:
    """Return the command as it would be typed; "" where the record does not hold it."""
    words_typed = run.header.get("command")
    if not isinstance(words_typed, list) or not words_typed:
        return ""
    first, *rest = map(str, words_typed)
    if os.path.basename(first) == "__main__.py":
        return shlex.join(["python", "-m", os.path.basename(os.path.dirname(first)), *rest])
    return shlex.join([os.path.basename(first) if first.endswith("/lockstep") else first, *rest])


@dataclass(frozen=True)
class Facts:
    """Some named facts under one heading."""

    name: str
    facts: dict[str, str]


def facts(run: Run) -> list[Facts]:
    """Return environment, layout, options and variables, as far as the record has them."""
    environment = dict(run.environment)
    variables = mapping(environment.pop("variables", None))
    octets = real(environment.pop("memory_bytes", None))
    if math.isfinite(octets):
        environment["memory"] = words.size(octets)
    started = {"started": run.header["started"]} if run.header.get("started") else {}
    groups = {
        "Environment": started | environment,
        "Layout": run.layout,
        "Options": mapping(run.header.get("options")),
        "Model": mapping(run.header.get("model")),
        "Environment variables": variables,
    }
    shown = {name: dict(flattened(values)) for name, values in groups.items()}
    return [Facts(name, values) for name, values in shown.items() if values]


def flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested facts as text under dotted names; what is empty is left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{prefix}{name}", shown(value)


def shown(value: Any) -> str:
    """Return one fact as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return words.count(value) if isinstance(value, int) and abs(value) >= 10000 else str(value)


def markdown(run: Run) -> str:
    """Return the report of `run` in Markdown, for an issue."""
    summary = summarise(run)
    lines = [f"## {summary.name} ({STATES[run.state]})", "", *headline(run, summary)]
    lines += [f"\n> {sentence}" for sentence in (trouble(run, summary), *run.remarks) if sentence]
    lines += ["", "| figure | value |", "|---|---|"]
    lines += [f"| {tile.name} | {tile.value} |" for tile in tiles(run, summary)]
    if summary.digest:
        lines.append(f"| digest of the weights | `{summary.digest}` |")
    lines += ["", *(f"- {sentence}" for sentence in findings(run))]
    lines += split_table(run)
    lines += epoch_lines(run)
    if run.warnings:
        lines += ["", "### Warnings", ""]
        lines += [f"- {warning(line)}" for line in run.warnings[:WARNINGS]]
    if command(run):
        lines += ["", "### Command", "", "```", command(run), "```"]
    for group in facts(run):
        lines += ["", f"<details><summary>{group.name}</summary>", "", "| | |", "|---|---|"]
        lines += [f"| {cell(name)} | {cell(value)} |" for name, value in group.facts.items()]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def split_table(run: Run) -> list[str]:
    """Return the split of the ranks' time as a Markdown table."""
    splits = rank_splits(run)[:RANKS]
    if not splits:
        return []
    lines = ["", f"| rank | time | {' | '.join(PARTS)} |", "|---|---|" + "---|" * len(PARTS)]
    for one in splits:
        parts = " | ".join(words.percent(share) for share in one.shares.values())
        lines.append(f"| {one.rank} | {words.duration(one.seconds)} | {parts} |")
    return lines


def epoch_lines(run: Run) -> list[str]:
    """Return the epochs as a Markdown table."""
    table = epoch_table(run)
    if not table.rows:
        return []
    rows = [f"| {' | '.join(row)} |" for row in table.rows]
    if table.hidden:
        rows.insert(EPOCHS // 2, f"| ... {table.hidden} more |")
    return ["", f"| {' | '.join(table.names)} |", "|---" * len(table.names) + "|", *rows]


def cell(value: str) -> str:
    """Return text that stays within a Markdown table's cell."""
    return value.replace("|", "\\|").replace("\n", " ")
