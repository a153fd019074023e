"""The report of one run, as a self-contained HTML page: sentences, tables and charts.

The page loads no other files, and its policy allows the browser no script: markup that passed
unescaped would run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from lockstep.formatting import (
    format_bytes,
    format_digest,
    format_duration,
    format_loss,
    format_metric_value,
    format_number,
    format_percent,
)
from lockstep.launcher.run_folder import RECORD_FILE
from lockstep.record.reader import Run
from lockstep.tools.report.breakdown import (
    RESUME_COLUMNS,
    epoch_table,
    peak_memory,
    resume_table,
    time_by_rank,
    time_shares,
)
from lockstep.tools.report.run_charts import (
    draw_run_charts,
    logged_histograms,
    logged_images,
)
from lockstep.tools.report.summary import Summary, as_text, summarize_run
from lockstep.tools.report.summary_text import (
    STATE_NAMES,
    checkpoint_sentence,
    command_line,
    headline,
    resume_sentence,
    round_sentence,
    settings_groups,
    state_sentence,
    timing_sentences,
    warning_sentence,
)
from lockstep.version import VERSION

__all__ = ["report_html"]

MAX_WARNINGS = 50  # warnings that are listed
MAX_RANKS = 64  # ranks that are listed


def report_html(run: Run) -> str:
    """Return the report of a run as one self-contained HTML page."""
    summary = summarize_run(run)
    warnings = [*run.findings, *run.warnings]
    return _render(
        "report.html",
        summary=summary,
        state_name=STATE_NAMES[run.state],
        headline=headline(run, summary),
        state_sentence=state_sentence(run, summary),
        remarks=run.remarks,
        tiles=_tiles(summary),
        charts=draw_run_charts(run),
        images=logged_images(run),
        histograms=logged_histograms(run),
        timing_sentences=timing_sentences(run),
        times=time_by_rank(run)[:MAX_RANKS],
        total_shares=time_shares(run),
        memory=peak_memory(run)[:MAX_RANKS],
        round_sentence=round_sentence(run),
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


def _tiles(summary: Summary) -> dict[str, str]:
    """Return the key figures of a run by their names."""
    measured = "held out" if summary.held_out else "training"
    metrics = list(summary.metrics.items())[:2]
    return {
        **{f"{name}, {measured}": format_metric_value(name, value) for name, value in metrics},
        f"loss, {measured}": format_loss(summary.loss),
        "samples/s (mean)": format_number(summary.speed),
        "per step (median)": format_duration(summary.step_seconds),
        "duration of the run": format_duration(summary.seconds),
    }


def _render(template: str, **values: Any) -> str:
    """Render a template with `values`, which are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lockstep.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(duration=format_duration, percent=format_percent, size=format_bytes)
    environment.filters["state_digest"] = format_digest
    style = environment.get_template("style.css").render()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = environment.get_template(template)
    return page.render(style=style, style_hash=f"sha256-{digest}", **values)
