"""`lockstep schedule`: simulates and draws the pipeline schedule."""

from __future__ import annotations

import click

from lockstep.formatting import format_number, format_percent
from lockstep.pipeline.schedule import simulate

__all__ = ["command"]


@click.command()
@click.option("--stages", type=int, default=4, show_default=True, help="Number of ranks.")
@click.option(
    "--microbatches", type=int, default=8, show_default=True,
    help="Micro-batches per step.",
)  # fmt: skip
def command(stages: int, microbatches: int) -> None:
    """Draw the pipeline schedule, 1F1B.

    Each row is a rank. The number of a box is its micro-batch. The bubble is the share of idle
    time, the peak the maximum number of activations that a rank holds. A backward takes
    twice as long as a forward, and transfers take no time. Times are in units of one
    forward per rank.
    """
    from lockstep.record.timeline import Timeline, TimelineSpan
    from lockstep.tools.report.terminal import wrap
    from lockstep.tools.report.timeline_rendering import print_timeline, text_legend, text_scale

    spans = simulate(stages, microbatches)
    end = max(span.end for span in spans)
    bubble = 1 - sum(span.end - span.begin for span in spans) / (stages * end)
    title = f"1f1b · bubble {format_percent(bubble)} · takes {format_number(end)}"
    drawn = tuple(
        TimelineSpan(s.rank, s.action.kind, s.begin, s.end, s.rank, s.action.microbatch)
        for s in spans
    )
    timeline = Timeline(title, stages, drawn)
    click.echo(title)
    print_timeline(timeline, text_scale([timeline]))
    click.echo("\n" + "\n".join(wrap("   ".join(text_legend(timeline)))))
    peaks = " ".join(str(min(stages - rank, microbatches)) for rank in range(stages))
    click.echo(f"peak micro-batches by rank: {peaks}")
