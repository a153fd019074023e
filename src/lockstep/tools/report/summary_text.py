"""The text about a run: sentences on quality, speed, state and timing, and its settings."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_metric,
    format_number,
    format_percent,
    format_quantity,
)
from lockstep.launcher.failure_attribution import signal_name
from lockstep.record.columns import as_dict
from lockstep.record.reader import Run
from lockstep.tools.report.summary import (
    Summary,
    as_text,
    find_slowest_rank,
    last_time,
    name_weights,
    number_or,
)

__all__ = [
    "STATE_NAMES",
    "SettingsGroup",
    "command_line",
    "flatten_settings",
    "format_setting",
]
__all__ += [
    "checkpoint_sentence",
    "headline",
    "settings_groups",
    "state_sentence",
]
__all__ += ["learning_rate_text", "resume_sentence", "round_sentence"]
__all__ += ["timing_sentences", "warning_sentence"]

STATE_NAMES = {"done": "done", "failed": "failed", "running": "still running", "died": "died"}
STATE_NAMES |= {"stopped": "stopped"}


def headline(run: Run, summary: Summary) -> list[str]:
    """Return two sentences: the quality of the model, and the speed of the run."""
    return [_quality_sentence(run, summary), _speed_sentence(run, summary)]


def _quality_sentence(run: Run, summary: Summary) -> str:
    """Return a sentence: "digits: accuracy 97.2%, loss 0.0931 on held-out samples ..."."""
    what = summary.recipe or as_text(as_dict(run.header.get("model")).get("class")) or summary.name
    planned = number_or(run.header.get("epochs"))
    after = format_quantity(summary.epochs, "epoch")
    if planned > summary.epochs:
        after = f"{summary.epochs} of {format_quantity(planned, 'epoch')}"
    figures = [format_metric(*item) for item in summary.metrics.items() if math.isfinite(item[1])]
    figures += [f"loss {format_loss(summary.loss)}"] if math.isfinite(summary.loss) else []
    if not figures:
        return f"{what}: no step was recorded."
    measured = f"on held-out samples{name_weights(run)}" if summary.held_out else "in training"
    return f"{what}: {', '.join(figures)} {measured} after {after}."


def _speed_sentence(run: Run, summary: Summary) -> str:
    """Return a sentence with model, layout, samples, duration and speed."""
    model = as_dict(run.header.get("model"))
    parts = []
    if model.get("class"):
        size = number_or(model.get("parameters"))
        of = f" of {format_count(size)} parameters" if math.isfinite(size) else ""
        parts.append(f"{model['class']}{of}")
    parts += [f"on {summary.layout}"] if summary.layout else []
    sentence = " ".join(parts)
    work = f"{format_count(summary.samples)} samples in {format_quantity(summary.steps, 'step')}"
    sentence += f": {work}" if sentence else work
    sentence += f" took {format_duration(summary.seconds)}" if summary.seconds > 0 else ""
    if math.isfinite(summary.speed):
        sentence += f", {format_number(summary.speed)} samples/s during steps on average"
    return sentence + "."


def state_sentence(run: Run, summary: Summary) -> str:
    """Return the sentence about a run that is not done; "" for one that is."""
    at = format_duration(last_time(run))
    position = ""
    if len(run.steps):
        position = f", in epoch {run.steps.epoch[-1] + 1:.0f}, step {run.steps.step[-1]:,.0f}"
    resume = f" Resume it with: {summary.resume_command}" if summary.resume_command else ""
    failure = summary.message or "The run failed; its record has no message."
    since = number_or(run.resumes[-1].get("step")) if run.resumes else math.nan
    if since >= number_or((run.end or {}).get("steps"), 0):
        failure = f"Resuming after step {since:,.0f} failed: {failure}"
    return {
        "done": "",
        "failed": failure + resume,
        "stopped": f"This run was stopped on request {at} after its start{position}.{resume}",
        "running": f"This run is still going; its last line was written {at} after its "
        f"start{position}.",
        "died": f"This run ended without a last line, {at} after its start{position}: "
        f"it was killed, or its machine went down.{resume}",
    }[run.state]


def checkpoint_sentence(run: Run) -> str:
    """Return the sentence about the checkpoints that were saved; "" if there are none."""
    if not run.checkpoints:
        return ""
    step = number_or(run.checkpoints[-1].get("step"))
    size = number_or(run.checkpoints[-1].get("bytes"))
    where = f" after {format_quantity(step, 'step')}" if math.isfinite(step) else ""
    much = f" ({format_bytes(size)})" if math.isfinite(size) else ""
    return f"{format_quantity(len(run.checkpoints), 'checkpoint')}, the last one{where}{much}."


def resume_sentence(run: Run) -> str:
    """Return the sentence about the resumptions of a run; "" if there are none."""
    times = {1: "once", 2: "twice"}.get(len(run.resumes), f"{len(run.resumes)} times")
    return f"The run was resumed {times}." if run.resumes else ""


def round_sentence(run: Run) -> str:
    """Return the sentence about the ranks that died, joined and left; "" if the run is not elastic.

    A line of the record has lists of members, and the signals that killed those that died.
    """
    if not run.rounds:
        return ""
    lost, joined, left = (
        [one for line in run.rounds for one in _as_list(line.get(name))]
        for name in ("lost", "joined", "left")
    )
    numbers = [int(number_or(as_dict(death).get("signal"), 0)) for death in lost]
    names = sorted({signal_name(number) for number in numbers if number > 0})
    signals = f" ({', '.join(names)})" if names else ""
    parts = [f"{format_quantity(len(lost), 'rank')} died{signals}"]
    parts += [f"{format_count(len(joined))} joined"] if joined else []
    parts += [f"{format_count(len(left))} left"] if left else []
    return f"{format_quantity(len(run.rounds) + 1, 'round')}: {', '.join(parts)}."


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def timing_sentences(run: Run) -> list[str]:
    """Return sentences on the layout and the slowest rank."""
    sentences = []
    if len(run.layout_steps) < len(run.steps):
        first = run.layout_steps.step[0]
        sentences.append(
            f"The layout changed at step {first:,.0f}; times and speeds are those since."
        )
    if (slowest := find_slowest_rank(run)) is not None:
        sentences.append(
            f"Rank {slowest.rank} is the slowest: it works {format_duration(slowest.seconds)} per "
            f"step on average, {format_percent(slowest.excess)} more than the mean of the ranks, "
            f"and the others wait for it. It spends the time {slowest.where}."
        )
    return sentences


def learning_rate_text(run: Run) -> str:
    """Return the learning rate of a run: "0.05", "0.1 to 0.001", "" if it was not recorded.

    Between the first and the last one is the maximum, if it is higher.
    """
    rates = run.steps.lr[np.isfinite(run.steps.lr)]
    if not len(rates):
        return ""
    first = f"{rates[0]:.4g}"
    last = f"{rates[-1]:.4g}"
    top = f"{rates.max():.4g}"
    if rates.min() == rates.max():
        return first
    return " to ".join([first, last] if top in (first, last) else [first, top, last])


def warning_sentence(line: dict[str, Any]) -> str:
    """Return a record's line "warning" as a sentence."""
    at = number_or(line.get("t"))
    rank = line.get("rank")
    when = f"after {format_duration(at)}" if math.isfinite(at) else ""
    who = "" if rank is None else f"rank {rank}"
    origin = ", ".join(filter(None, (who, when)))
    return f"{origin}: {as_text(line.get('message'))}" if origin else as_text(line.get("message"))


def command_line(run: Run) -> str:
    """Return the run's command for a shell; "" if the record does not have it."""
    command = run.header.get("command")
    if not isinstance(command, list) or not command:
        return ""
    first, *rest = map(str, command)
    if first.endswith(".py") and os.path.basename(first) != "__main__.py":
        return shlex.join(["python", first, *rest])
    if os.path.basename(first) == "__main__.py":
        return shlex.join(["python", "-m", os.path.basename(os.path.dirname(first)), *rest])
    return shlex.join([os.path.basename(first) if first.endswith("/lockstep") else first, *rest])


@dataclass(frozen=True)
class SettingsGroup:
    """A group of settings under one heading, as text."""

    name: str
    values: dict[str, str]


def settings_groups(run: Run) -> list[SettingsGroup]:
    """Return the recorded environment, layout, options, model, optimizer and variables."""
    environment = dict(run.environment)
    variables = as_dict(environment.pop("variables", None))
    memory = number_or(environment.pop("memory_bytes", None))
    if math.isfinite(memory):
        environment["memory"] = format_bytes(memory)
    started = {"started": run.header["started"]} if run.header.get("started") else {}
    groups = {
        "Environment": started | environment,
        "Layout": run.layout,
        "Options": as_dict(run.latest("options")),
        "Model": as_dict(run.header.get("model")),
        "Optimizer": {"learning rate": learning_rate_text(run)}
        | as_dict(run.header.get("optimizer")),
        "Environment variables": variables,
    }
    flat = {name: dict(flatten_settings(values)) for name, values in groups.items()}
    return [SettingsGroup(name, values) for name, values in flat.items() if values]


def flatten_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as text under dotted names; empty ones are left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flatten_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            if value:
                yield f"{prefix}{name}", ", ".join(map(str, value))
        elif value is not None and value != "":
            yield f"{prefix}{name}", format_setting(value)


def format_setting(value: Any) -> str:
    """Return the value of one setting as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_count(value) if isinstance(value, int) and abs(value) >= 10000 else str(value)
