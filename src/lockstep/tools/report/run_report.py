"""The report of one run, as an HTML page or as Markdown.

Run ──┬─> summary, summary_text, breakdown ──┬─> report_html(run)       one self-contained page
      └─> charts, timeline ──────────────────┴─> report_markdown(run)   for an issue
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.formatting import (
    format_duration,
    format_loss,
    format_metric_value,
    format_number,
)
from lockstep.record.reader import Run
from lockstep.record.recorder import RECORD_FILE
from lockstep.record.timeline import typical_timeline
from lockstep.tools.report.breakdown import (
    MAX_RANKS,
    RESUME_COLUMNS,
    epoch_table,
    peak_memory,
    resume_table,
    time_by_rank,
    time_shares,
)
from lockstep.tools.report.chart import run_charts
from lockstep.tools.report.logged import logged_histograms, logged_images
from lockstep.tools.report.markdown import escape_markdown, fenced_block, markdown_table
from lockstep.tools.report.page import draw_panel, render_template
from lockstep.tools.report.rank_spread import spread_table
from lockstep.tools.report.reproduction import (
    CHECKPOINT_COLUMNS,
    checkpoint_table,
    summarize_reproduction,
)
from lockstep.tools.report.rounds import ROUND_COLUMNS, round_sentences, round_table
from lockstep.tools.report.summary import Summary, summarize
from lockstep.tools.report.summary_text import (
    STATE_NAMES,
    checkpoint_sentence,
    command_line,
    headline,
    learning_rate_sentence,
    resume_sentence,
    settings_groups,
    state_sentence,
    timeline_sentences,
    timing_sentences,
    warning_sentence,
)
from lockstep.tools.report.timeline_rendering import layout_timelines
from lockstep.version import VERSION

__all__ = ["report_html", "report_markdown"]

MAX_WARNINGS = 50  # warnings that are listed


def report_html(run: Run) -> str:
    """Return the report of a run as one self-contained HTML page."""
    recorded = typical_timeline(run)
    summary = summarize(run)
    panels = {chart.key: draw_panel(chart) for chart in run_charts(run)}
    times, repeated = time_by_rank(run), summarize_reproduction(run)
    warnings = [*run.findings, *run.warnings]
    return render_template(
        "report.html",
        summary=summary,
        state_name=STATE_NAMES[run.state],
        headline=headline(run, summary),
        state_sentence=state_sentence(run, summary),
        remarks=[*run.remarks, *repeated.remarks],
        tiles=_tiles(run, summary),
        duration_panel=panels.pop("seconds", None),
        panels=list(panels.values()),
        images=logged_images(run),
        histograms=logged_histograms(run),
        learning_rate_sentence=learning_rate_sentence(run),
        timing_sentences=timing_sentences(run),
        times=times[:MAX_RANKS],
        num_hidden_ranks=max(0, len(times) - MAX_RANKS),
        total_shares=time_shares(run),
        spread=spread_table(run),
        timelines=layout_timelines([recorded] if recorded else []),
        timeline_sentences=timeline_sentences(recorded),
        memory=peak_memory(run),
        round_sentences=list(round_sentences(run)),
        round_columns=ROUND_COLUMNS,
        rounds=round_table(run),
        epochs=epoch_table(run),
        checkpoint_sentence=checkpoint_sentence(run),
        checkpoint_columns=CHECKPOINT_COLUMNS,
        checkpoints=checkpoint_table(run),
        resume_sentence=resume_sentence(run),
        resume_columns=RESUME_COLUMNS,
        resumes=resume_table(run),
        warnings=[warning_sentence(line) for line in warnings[:MAX_WARNINGS]],
        num_hidden_warnings=max(0, len(warnings) - MAX_WARNINGS),
        command=command_line(run),
        reproduction=repeated,
        settings=settings_groups(run),
        version=VERSION,
        path=str(Path(run.folder.name) / RECORD_FILE),
    )


@dataclass(frozen=True)
class Tile:
    """A key figure with its name."""

    name: str
    value: str


def _tiles(run: Run, summary: Summary) -> list[Tile]:
    """Return the key figures of a run."""
    measured = "held out" if summary.held_out else "training"
    metrics = [
        Tile(f"{name}, {measured}", format_metric_value(name, value))
        for name, value in list(summary.metrics.items())[:2]
    ]
    figures = [
        Tile(f"loss, {measured}", format_loss(summary.loss)),
        Tile("samples per second", format_number(summary.speed)),
        Tile("per step (median)", format_duration(summary.step_seconds)),
        Tile("duration of the run", format_duration(summary.seconds)),
    ]
    return metrics + figures


def report_markdown(run: Run) -> str:
    """Return the report of a run in Markdown."""
    summary, repeated = summarize(run), summarize_reproduction(run)
    lines = [f"## {escape_markdown(summary.name)} ({STATE_NAMES[run.state]})", ""]
    lines += map(escape_markdown, headline(run, summary))
    remarks = [state_sentence(run, summary), *run.remarks, *repeated.remarks]
    lines += [f"\n> {escape_markdown(sentence)}" for sentence in remarks if sentence]
    figures = [(tile.name, tile.value) for tile in _tiles(run, summary)]
    if summary.digest:
        figures.append(("digest of the weights", summary.digest))
    if summary.optimizer_digest:
        figures.append(("digest of the optimizer state", summary.optimizer_digest))
    lines += ["", *markdown_table(("figure", "value"), figures)]
    sentences = [*timing_sentences(run), *timeline_sentences(typical_timeline(run))]
    sentences = [*filter(None, [learning_rate_sentence(run)]), *sentences]
    lines += ["", *(f"- {escape_markdown(sentence)}" for sentence in sentences)]
    others = (*round_sentences(run), checkpoint_sentence(run), resume_sentence(run))
    lines += [f"- {escape_markdown(sentence)}" for sentence in others if sentence]
    if warnings := [*run.findings, *run.warnings]:
        lines += ["", "### Warnings", ""]
        lines += [
            f"- {escape_markdown(warning_sentence(line))}" for line in warnings[:MAX_WARNINGS]
        ]
    if command := command_line(run):
        lines += ["", "### Command", "", *fenced_block(command)]
    if repeated.sentences:
        lines += ["", *(f"- {escape_markdown(sentence)}" for sentence in repeated.sentences)]
    for group in settings_groups(run):
        lines += ["", f"<details><summary>{group.name}</summary>", ""]
        lines += [*markdown_table(("", ""), list(group.values.items())), "", "</details>"]
    return "\n".join(lines) + "\n"
