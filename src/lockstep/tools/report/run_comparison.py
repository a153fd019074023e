"""Comparison of runs: speed, digests, losses and settings.

Each run is compared with the first one.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.formatting import (
    format_duration,
    format_loss,
    format_metric_value,
    format_number,
)
from lockstep.record.columns import as_dict
from lockstep.record.reader import Run
from lockstep.record.run_environment import describe_other_arithmetic
from lockstep.tools.report.breakdown import resume_table
from lockstep.tools.report.summary import (
    MIN_EXCESS,
    Summary,
    find_longest_work,
    find_slowest_rank,
    summarize_run,
)
from lockstep.tools.report.summary_text import (
    STATE_NAMES,
    command_line,
    flatten_settings,
    format_setting,
    learning_rate_text,
)

__all__ = [
    "PairComparison",
    "RunComparison",
    "compare_runs",
    "comparison_json",
    "comparison_table",
    "find_setting_differences",
    "settings_sentences",
]


RATE = "learning rate"
MAX_NAMED = 6  # settings in a sentence


@dataclass(frozen=True)
class PairComparison:
    """The comparison of one run with the first one.

    Attributes:
        name: The name of the run.
        speed_ratio: Its speed relative to the first one; NaN if a run has no steps.
        same_digest: Whether both have the same final weights; None if a digest is missing.
        num_compared: The number of steps that both have.
        first_difference: The first of these steps whose losses differ; None if all are equal.
        sentences: The comparison in words.
    """

    name: str
    speed_ratio: float
    same_digest: bool | None
    num_compared: int
    first_difference: int | None
    sentences: list[str]


@dataclass(frozen=True)
class RunComparison:
    """The comparison of runs; `pairs` holds one comparison with the first run per other run."""

    runs: list[Run]
    names: list[str]
    summaries: list[Summary]
    pairs: list[PairComparison]
    settings: dict[str, list[str]]


def compare_runs(runs: list[Run]) -> RunComparison:
    """Compare two or more runs with the first of them."""
    names = _unique_names(runs)
    summaries = list(map(summarize_run, runs))
    pairs = []
    for run, name, summary in list(zip(runs, names, summaries, strict=True))[1:]:
        ratio = summary.speed / (summaries[0].speed or math.nan)
        count, step, ours, theirs = _first_difference(runs[0], run, "loss")
        same = _same_digest(runs[0], run)
        sentences = [
            *_speed_sentences(ratio, names[0], name),
            *_rank_sentences(runs[0], run, names[0], name),
            _digest_sentence(names[0], name, same),
            *_optimizer_sentences(runs[0], run),
            _loss_sentence(count, step, f"{theirs!r} in {name} and {ours!r} in {names[0]}"),
        ]
        if same is False or step is not None:
            sentences += settings_sentences(runs[0], run)
            sentences += _bisect_sentences(runs[0], run)
        pairs.append(PairComparison(name, ratio, same, count, step, sentences))
    return RunComparison(runs, names, summaries, pairs, find_setting_differences(runs))


def _unique_names(runs: list[Run]) -> list[str]:
    """Return the names of the runs, or their folders if several have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _first_difference(first: Run, second: Run, name: str) -> tuple[int, int | None, float, float]:
    """Compare a column of two runs at the steps that both have.

    Returns:
        The number of compared steps; the first step at which the values differ, None if there is
        none; and both values at that step.
    """
    _, ours, theirs = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    a = getattr(first.steps, name)[ours]
    b = getattr(second.steps, name)[theirs]
    apart = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if not len(apart):
        return len(ours), None, math.nan, math.nan
    at = apart[0]
    return len(ours), int(first.steps.step[ours[at]]), float(a[at]), float(b[at])


def _same_digest(first: Run, second: Run) -> bool | None:
    """Return whether two runs have the same final weights; None if a digest is missing."""
    digests = [(run.end or {}).get("digest") for run in (first, second)]
    return digests[0] == digests[1] if all(digests) else None


def _speed_sentences(ratio: float, first: str, second: str) -> list[str]:
    """Return the sentence about the speeds, if they are known."""
    if not math.isfinite(ratio):
        return []
    return [
        f"{second} trained {ratio:.2f} times as many samples per second as {first}, on average "
        "during steps."
    ]


def _rank_sentences(first: Run, second: Run, name_of_first: str, name: str) -> list[str]:
    """Return the sentence about the rank that holds up the others of the slower run."""
    names = [name_of_first, name]
    times = [find_longest_work(run) for run in (first, second)]
    slower = int(times[1] > times[0])
    faster = 1 - slower
    slowest = find_slowest_rank((first, second)[slower])
    if slowest is None or not times[slower] > (1 + MIN_EXCESS) * times[faster]:
        return []
    return [
        f"In {names[slower]}, the others wait for rank {slowest.rank}: it works "
        f"{format_duration(times[slower])} per step, where the slowest rank of {names[faster]} "
        f"works {format_duration(times[faster])}. It spends the time {slowest.where}."
    ]


def _digest_sentence(first: str, second: str, same: bool | None) -> str:
    """Return the sentence about the final weights."""
    if same is None:
        return "Digests cannot be compared: not all runs reached their end."
    if same:
        return f"{second} and {first} have bit-identical final weights: the digests are equal."
    return f"{second} and {first} have different final weights: the digests differ."


def _optimizer_sentences(first: Run, second: Run) -> list[str]:
    """Return the sentence about the optimizer states, if only these differ."""
    digests = [(run.end or {}).get("optimizer_digest") for run in (first, second)]
    if not all(digests) or digests[0] == digests[1] or not _same_digest(first, second):
        return []
    return ["Their optimizer states differ, although their weights are the same."]


# The prefixes of the settings that can change results, and the options among them that cannot.
DECISIVE = ("optimizer.", "options.", "model.", "layout.microbatches", "layout.threads")
INDECISIVE = {
    "options.activation_checkpointing", "options.checkpoint_every", "options.download",
    "options.lr", "options.quiet", "options.schedule", "options.stages",
    "options.workers",
}  # fmt: skip


def settings_sentences(first: Run, second: Run) -> list[str]:
    """Return sentences about settings and processors that may explain different results."""
    are_portable = first.environment.get("portable") and second.environment.get("portable")
    indecisive = INDECISIVE | ({"layout.threads"} if are_portable else set())
    differences = [
        f"{name} ({' and '.join(values)})"
        for name, values in find_setting_differences([first, second]).items()
        if all(values)  # a record of another version may lack a setting
        and (name == RATE or (name.startswith(DECISIVE) and name not in indecisive))
    ]
    other = describe_other_arithmetic(first.environment, second.environment)
    sentences = [f"{other}."] if other else []
    if not differences:
        return sentences
    hidden = f" and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    named = ", ".join(differences[:MAX_NAMED])
    return [*sentences, f"These settings differ and can change results: {named}{hidden}."]


def _loss_sentence(num_compared: int, step: int | None, values: str) -> str:
    """Return the sentence about the losses."""
    if not num_compared:
        return "They have no steps in common, so their losses cannot be compared."
    if step is None:
        return f"Their losses are bit-identical at all {num_compared:,} common steps."
    return (
        f"Their losses first differ at step {step:,}: {values} ({num_compared:,} steps compared)."
    )


def _bisect_sentences(first: Run, second: Run) -> list[str]:
    """Return the sentence about the command that finds the first difference, if there is one."""
    if first.layout.get("microbatches") != second.layout.get("microbatches"):
        return []
    words = ["lockstep", "bisect", *(os.path.relpath(run.folder) for run in (first, second))]
    return [f"To find the first operator that computes other bits: {shlex.join(words)}"]


def find_setting_differences(runs: list[Run]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with the value of each run."""
    by_run = [_flat_settings(run) for run in runs]
    names = dict.fromkeys(name for settings in by_run for name in settings)
    table = {RATE: _rate_texts(runs)}
    table |= {name: [settings.get(name, "") for settings in by_run] for name in names}
    return {name: values for name, values in table.items() if len(set(values)) > 1}


def _rate_texts(runs: list[Run]) -> list[str]:
    """Return the learning rates of runs, and the first step at which a schedule differs."""
    texts = [learning_rate_text(run) for run in runs]
    for at, run in enumerate(runs[1:], 1):
        _, step, ours, theirs = _first_difference(runs[0], run, "lr")
        if step is not None and texts[at] == texts[0]:
            texts[at] += f", other values from step {step:,}: {theirs!r} instead of {ours!r}"
    return texts


def _flat_settings(run: Run) -> dict[str, str]:
    settings: dict[str, str] = {"command": command_line(run)}
    for part in ("layout", "options", "model", "optimizer", "environment"):
        value: Any = run.latest(part)
        if isinstance(value, dict):
            settings |= dict(flatten_settings(value, "" if part == "environment" else f"{part}."))
    for name, value in as_dict(run.latest("variables")).items():
        settings[name] = str(value)
    for name in ("recipe", "epochs", "steps_per_epoch", "samples"):
        if name in run.header:
            settings[name] = format_setting(run.header[name])
    if run.resumes:
        settings["resumed from step"] = ", ".join(row[0] for row in resume_table(run)[1:])
    return settings


def comparison_table(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    """Return the figures of the runs side by side: column names and rows of text."""
    metrics = list(dict.fromkeys(name for one in comparison.summaries for name in one.metrics))
    names = [
        "run",
        "state",
        "layout",
        *metrics,
        "loss",
        "samples/s (mean)",
        "per step (median)",
        "digest of weights",
    ]
    rows = []
    for name, one in zip(comparison.names, comparison.summaries, strict=True):
        cells = [
            format_metric_value(metric, one.metrics.get(metric, math.nan)) for metric in metrics
        ]
        figures = [
            *cells,
            format_loss(one.loss),
            format_number(one.speed),
            format_duration(one.step_seconds),
        ]
        rows.append([name, STATE_NAMES[one.state], one.layout, *figures, one.digest[:12]])
    return names, rows


def comparison_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    runs = [
        {"name": name, "samples_per_second": _finite(one.speed), "digest": one.digest}
        for name, one in zip(comparison.names, comparison.summaries, strict=True)
    ]
    against = [
        {
            "name": pair.name,
            "speed_ratio": _finite(pair.speed_ratio),
            "same_digest": pair.same_digest,
            "steps_compared": pair.num_compared,
            "losses_part_at": pair.first_difference,
            "sentences": pair.sentences,
        }
        for pair in comparison.pairs
    ]
    return {"runs": runs, "against": against, "differs": comparison.settings}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
