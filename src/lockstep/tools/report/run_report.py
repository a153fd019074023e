"""The report of one run, as an HTML page: sentences, tables, charts and the timeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.formatting import (
    format_duration,
    format_loss,
    format_metric_value,
    format_number,
)
from lockstep.record.format import RECORD_FILE
from lockstep.record.reader import Run
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
from lockstep.tools.report.page import draw_panel, render_template
from lockstep.tools.report.rank_spread import mean_times
from lockstep.tools.report.rounds import round_sentences
from lockstep.tools.report.summary import Summary, as_text, summarize
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

__all__ = ["report_html"]

MAX_WARNINGS = 50  # warnings that are listed


def report_html(run: Run) -> str:
    """Return the report of a run as one self-contained HTML page."""
    recorded = typical_timeline(run)
    summary = summarize(run)
    panels = {chart.key: draw_panel(chart) for chart in run_charts(run)}
    times = time_by_rank(run)
    warnings = [*run.findings, *run.warnings]
    return render_template(
        "report.html",
        summary=summary,
        state_name=STATE_NAMES[run.state],
        headline=headline(run, summary),
        state_sentence=state_sentence(run, summary),
        remarks=run.remarks,
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
        is_summarized=bool(mean_times(run)),
        timelines=layout_timelines([recorded] if recorded else []),
        timeline_sentences=timeline_sentences(recorded),
        memory=peak_memory(run),
        round_sentences=list(round_sentences(run)),
        epochs=epoch_table(run),
        checkpoint_sentence=checkpoint_sentence(run),
        resume_sentence=resume_sentence(run),
        resume_columns=RESUME_COLUMNS,
        resumes=resume_table(run),
        warnings=[warning_sentence(line) for line in warnings[:MAX_WARNINGS]],
        num_hidden_warnings=max(0, len(warnings) - MAX_WARNINGS),
        command=command_line(run),
        sources=as_text(run.latest("sources")),
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
