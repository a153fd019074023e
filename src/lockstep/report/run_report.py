"""The report of one run: its sentences and figures, as a page or as Markdown.

Run ──┬─> summary, sentences, breakdown, settings ──┬─> html(run)       one self-contained page
      └─> charts ───────────────────────────────────┴─> markdown(run)   for an issue
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.formatting import format_duration, format_number, format_percent, is_ratio
from lockstep.record.reader import Run
from lockstep.record.recorded import typical
from lockstep.record.recorder import FILE, PARTS
from lockstep.record.timeline import Timeline
from lockstep.report.breakdown import EPOCHS, RANKS, epoch_table, memory, rank_splits, shares
from lockstep.report.chart import curves
from lockstep.report.markdown import block, text
from lockstep.report.markdown import table as markdown_table
from lockstep.report.page import panel, render
from lockstep.report.settings import command, facts
from lockstep.report.summary import Summary, summarise
from lockstep.report.summary_text import (
    STATES,
    findings,
    headline,
    moments,
    trouble,
    waited,
    warning,
)
from lockstep.report.track import tracks
from lockstep.report.waits import Waits, table, waits

__all__ = ["html", "markdown"]

WARNINGS = 50  # warnings listed at most


def html(run: Run, simulated: Timeline | None = None) -> str:
    """Return the report of `run` as one self-contained HTML page.

    `simulated` is drawn below the timeline: what it was to be.
    """
    real, found = typical(run), waits(run)
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
        tracks=tracks([one for one in (real, simulated) if one]),
        moments=moments(real, simulated),
        waits=found and Matrix.of(found),
        memory=memory(run),
        epochs=epoch_table(run),
        warnings=[warning(line) for line in run.warnings[:WARNINGS]],
        hidden_warnings=max(0, len(run.warnings) - WARNINGS),
        command=command(run),
        facts=facts(run),
        version=lockstep.__version__,
        path=str(Path(run.folder.name) / FILE),
    )


@dataclass(frozen=True)
class Matrix:
    """Who waits for whom, as a table of text with its sentence."""

    names: list[str]
    rows: list[list[str]]
    words: str

    @classmethod
    def of(cls, found: Waits) -> Matrix:
        """Return the table of `found`."""
        return cls(*table(found), waited(found))


@dataclass(frozen=True)
class Tile:
    """One key figure and its name."""

    name: str
    value: str


def tiles(run: Run, summary: Summary) -> list[Tile]:
    """Return the key figures."""
    place = "held out" if summary.held_out else "training"
    metrics = [
        Tile(f"{name}, {place}", format_percent(value) if is_ratio(name) else format_number(value))
        for name, value in list(summary.metrics.items())[:2]
    ]
    figures = [
        Tile(f"loss, {place}", f"{summary.loss:.4f}" if math.isfinite(summary.loss) else "?"),
        Tile("samples a second", format_number(summary.speed)),
        Tile("a step (median)", format_duration(summary.step_seconds)),
        Tile("the whole run", format_duration(summary.seconds)),
    ]
    return metrics + figures


def markdown(run: Run) -> str:
    """Return the report of `run` in Markdown, for an issue."""
    summary = summarise(run)
    lines = [f"## {text(summary.name)} ({STATES[run.state]})", ""]
    lines += map(text, headline(run, summary))
    remarks = [trouble(run, summary), *run.remarks]
    lines += [f"\n> {text(sentence)}" for sentence in remarks if sentence]
    figures = [(tile.name, tile.value) for tile in tiles(run, summary)]
    if summary.digest:
        figures.append(("digest of the weights", summary.digest))
    lines += ["", *markdown_table(("figure", "value"), figures)]
    sentences = [*findings(run), *moments(typical(run), None)]
    lines += ["", *(f"- {text(sentence)}" for sentence in sentences)]
    lines += split_table(run)
    lines += waits_table(run)
    lines += epoch_lines(run)
    if run.warnings:
        lines += ["", "### Warnings", ""]
        lines += [f"- {text(warning(line))}" for line in run.warnings[:WARNINGS]]
    if command(run):
        lines += ["", "### Command", "", *block(command(run))]
    for group in facts(run):
        lines += ["", f"<details><summary>{group.name}</summary>", ""]
        lines += [*markdown_table(("", ""), list(group.facts.items())), "", "</details>"]
    return "\n".join(lines) + "\n"


def split_table(run: Run) -> list[str]:
    """Return the split of the ranks' time as a Markdown table."""
    rows = [
        [str(one.rank), format_duration(one.seconds), *map(format_percent, one.shares.values())]
        for one in rank_splits(run)[:RANKS]
    ]
    return ["", *markdown_table(("rank", "time", *PARTS), rows)] if rows else []


def waits_table(run: Run) -> list[str]:
    """Return who waits for whom as a Markdown table."""
    found = waits(run)
    if found is None:
        return []
    return ["", text(waited(found)), "", *markdown_table(*table(found))]


def epoch_lines(run: Run) -> list[str]:
    """Return the epochs as a Markdown table."""
    table = epoch_table(run)
    if not table.rows:
        return []
    rows = list(table.rows)
    if table.hidden:
        rows.insert(EPOCHS // 2, [f"... {table.hidden} more"])
    return ["", *markdown_table(table.names, rows)]
