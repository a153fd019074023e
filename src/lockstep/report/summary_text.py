"""A run in sentences: how well, where and how fast, what became of it, what stands out."""

from __future__ import annotations

import math
from typing import Any

from lockstep.formatting import (
    format_count,
    format_duration,
    format_metric,
    format_number,
    format_percent,
)
from lockstep.record.columns import mapping
from lockstep.record.reader import Run
from lockstep.record.timeline import Timeline
from lockstep.report.summary import (
    Summary,
    last_time,
    many,
    real,
    slowest_rank,
    slowest_step,
    text,
)
from lockstep.report.waits import Waits

__all__ = ["STATES", "findings", "headline", "moments", "trouble", "waited", "warning"]

STATES = {"done": "done", "failed": "failed", "running": "still running", "died": "died"}


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
    found = [format_metric(*item) for item in summary.metrics.items() if math.isfinite(item[1])]
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
        of = f" of {format_count(size)} parameters" if math.isfinite(size) else ""
        parts.append(f"{model['class']}{of}")
    parts += [f"on {summary.layout}"] if summary.layout else []
    sentence = " ".join(parts)
    work = f"{format_count(summary.samples)} samples in {many(summary.steps, 'step')}"
    sentence += f": {work}" if sentence else work
    sentence += f" took {format_duration(summary.seconds)}" if summary.seconds > 0 else ""
    if math.isfinite(summary.speed):
        sentence += f", {format_number(summary.speed)} samples/s while stepping"
    return sentence + "."


def trouble(run: Run, summary: Summary) -> str:
    """Say what became of a run that is not done; nothing for one that is."""
    at = format_duration(last_time(run))
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


def findings(run: Run) -> list[str]:
    """Say what stands out in the times: the slowest rank, the slowest step."""
    found = []
    rank, step = slowest_rank(run), slowest_step(run)
    if rank is not None:
        found.append(
            f"Rank {rank.rank} is the slowest: it works {format_duration(rank.seconds)} a step, "
            f"{format_percent(rank.excess)} more than the ranks' mean, and the others wait for it."
        )
    elif run.steps.ranks.shape[1] > 1:
        found.append("No rank stands out as slow.")
    if step is not None and len(run.steps) > 1:
        much = f", {format_number(step.medians)} times the median" if step.medians > 1.5 else ""
        cause = (
            f"; most of the excess is {step.part} on rank {step.rank}" if much and step.part else ""
        )
        found.append(
            f"The slowest step is {step.step:,} (epoch {step.epoch + 1}): "
            f"{format_duration(step.seconds)}{much}{cause}."
        )
    return found


def moments(real: Timeline | None, simulated: Timeline | None) -> list[str]:
    """Say how busy the ranks were in the timeline that is shown, and how busy they were to be."""
    if real is None:
        return []
    took = f"{real.title} took {format_duration(real.length)}".capitalize()
    idle = f"the ranks idled {format_percent(real.bubble)} of it"
    balance = f"their work is balanced to {format_percent(real.balance)} (mean over most loaded)"
    found = [f"{took}; {idle}, and {balance}."]
    if simulated is not None:
        same = real.only(simulated.kinds)
        found.append(
            f"Its forwards and backwards took {format_duration(same.length)} with "
            f"{format_percent(same.bubble)} idle. Simulated with the same times, and nothing ever "
            f"on its way, they take {format_duration(simulated.length)} with "
            f"{format_percent(simulated.bubble)} idle; the rest is transfers, overhead and "
            "unevenness."
        )
    return found


def waited(found: Waits) -> str:
    """Say what the matrix of waiting shows."""
    return (
        f"A row a rank: how long it waits in a step for each other rank, and how many bytes it "
        f"gets from it; means of {many(found.steps, 'step')}."
    )


def warning(line: dict[str, Any]) -> str:
    """Return a warning's line as a sentence."""
    at, rank = real(line.get("t")), line.get("rank")
    when = f"after {format_duration(at)}" if math.isfinite(at) else ""
    who = "" if rank is None else f"rank {rank}"
    place = ", ".join(filter(None, (who, when)))
    return f"{place}: {text(line.get('message'))}" if place else text(line.get("message"))
