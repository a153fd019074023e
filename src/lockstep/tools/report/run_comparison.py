"""Comparison of runs: speed, digests, losses and settings.

Each run is compared with the first one. If one run is faster, the sentence about it also names
other possible reasons: different machines, a busy machine.
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
    format_percent,
)
from lockstep.record.columns import Column, as_dict
from lockstep.record.reader import Run
from lockstep.record.run_environment import describe_other_arithmetic
from lockstep.tools.report.breakdown import resume_table
from lockstep.tools.report.summary import Summary, number_or, summarize
from lockstep.tools.report.summary_text import (
    BUSY,
    STATE_NAMES,
    command_line,
    flatten_settings,
    format_setting,
    learning_rate_text,
)

__all__ = [
    "LossDifference",
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
WARMUP_FRACTION = 0.05  # fraction of the steps that does not count for the speed
NUM_BLOCKS, MIN_BLOCKS = 20, 6  # blocks of steps; fewer allow no conclusion
NUM_RESAMPLES = 4000


@dataclass(frozen=True)
class SpeedRatio:
    """The ratio of the second run's speed to the first one's, with its 95% interval, or NaN."""

    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def is_known(self) -> bool:
        """Whether the runs have enough steps for a conclusion."""
        return math.isfinite(self.ratio)

    @property
    def is_significant(self) -> bool:
        """Whether the variation of the steps does not explain the difference."""
        return self.is_known and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class LossDifference:
    """The first step at which the losses of two runs differ, with both losses.

    `step` is None if the losses of all `num_compared` steps are bit-identical.
    """

    num_compared: int
    step: int | None = None
    first: float = math.nan
    second: float = math.nan


@dataclass(frozen=True)
class PairComparison:
    """The comparison of one run with the first one; `sentences` describe it."""

    name: str
    speed: SpeedRatio
    same_digest: bool | None
    losses: LossDifference
    sentences: list[str]


@dataclass(frozen=True)
class RunComparison:
    """The comparison of runs; `pairs` holds one comparison with the first run per other run."""

    runs: list[Run]
    names: list[str]
    summaries: list[Summary]
    speeds: list[float]
    pairs: list[PairComparison]
    settings: dict[str, list[str]]


def compare_runs(runs: list[Run]) -> RunComparison:
    """Compare two or more runs with the first of them."""
    names = _unique_names(runs)
    costs = [_sample_seconds(run) for run in runs]
    pairs = []
    for run, name, cost in list(zip(runs, names, costs, strict=True))[1:]:
        speed = compare_speeds(costs[0], cost)
        losses = _compare_losses(runs[0], run)
        same = _same_digest(runs[0], run)
        sentences = [
            _speed_sentence((runs[0], run), (names[0], name), speed),
            _digest_sentence(names[0], name, same),
            *_optimizer_sentences(runs[0], run),
            *_loss_sentences(losses, names[0], name),
            *settings_sentences(runs[0], run, is_same=same is not False and losses.step is None),
            *_bisect_sentences(runs[0], run, is_same=same is not False and losses.step is None),
        ]
        pairs.append(PairComparison(name, speed, same, losses, sentences))
    return RunComparison(
        runs=runs,
        names=names,
        summaries=list(map(summarize, runs)),
        speeds=[1 / float(np.median(cost)) if len(cost) else math.nan for cost in costs],
        pairs=pairs,
        settings=find_setting_differences(runs),
    )


def _sample_seconds(run: Run) -> Column:
    """Return the seconds per sample of each step in the last layout, without the first steps."""
    steps = run.layout_steps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        cost = steps.seconds / np.where(np.isfinite(steps.samples), steps.samples, 1.0)
    cost = cost[math.ceil(WARMUP_FRACTION * len(cost)) :]
    return cost[np.isfinite(cost) & (cost > 0)]


def compare_speeds(first: Column, second: Column) -> SpeedRatio:
    """Compare two runs by the seconds per sample of their steps.

    Consecutive steps are correlated, because a busy machine stays busy for a while. The interval is
    therefore bootstrapped from the medians of blocks of steps. The resampling is seeded, so the
    result is reproducible.
    """
    if min(len(first), len(second)) < MIN_BLOCKS:
        return SpeedRatio()
    generator = np.random.default_rng(0)
    resampled = []
    for cost in (first, second):
        blocks = np.array_split(cost, min(NUM_BLOCKS, len(cost)))
        medians = np.array([np.median(block) for block in blocks])
        drawn = generator.integers(0, len(medians), (NUM_RESAMPLES, len(medians)))
        resampled.append(np.median(medians[drawn], axis=1))
    low, high = np.quantile(resampled[0] / resampled[1], [0.025, 0.975])
    return SpeedRatio(float(np.median(first) / np.median(second)), float(low), float(high))


def _unique_names(runs: list[Run]) -> list[str]:
    """Return the names of the runs, or their folders if several have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _compare_losses(first: Run, second: Run) -> LossDifference:
    """Find the first step at which the losses of two runs differ."""
    return LossDifference(*_first_difference(first, second, "loss"))


def _first_difference(first: Run, second: Run, name: str) -> tuple[int, int | None, float, float]:
    """Compare a column of two runs at the steps that both have.

    Returns:
        The number of compared steps; the first step at which the values differ, None if there is
        none; and both values at that step.
    """
    _, ours, theirs = np.intersect1d(first.steps.step, second.steps.step, return_indices=True)
    a, b = getattr(first.steps, name)[ours], getattr(second.steps, name)[theirs]
    apart = np.flatnonzero(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if not len(apart):
        return len(ours), None, math.nan, math.nan
    at = apart[0]
    return len(ours), int(first.steps.step[ours[at]]), float(a[at]), float(b[at])


def _same_digest(first: Run, second: Run) -> bool | None:
    """Return whether two runs have the same final weights; None if a digest is missing."""
    digests = [(run.end or {}).get("digest") for run in (first, second)]
    return digests[0] == digests[1] if all(digests) else None


def _speed_sentence(runs: tuple[Run, Run], names: tuple[str, str], speed: SpeedRatio) -> str:
    """Return the sentence about the difference in speed and its other possible reasons."""
    first, second = names
    busy = " and ".join(_busy_phrases(runs, names))
    caveat = f"; the machine was busy: {busy}" if busy else ""
    if not speed.is_known:
        return f"{second} and {first} have too few steps to decide which is faster{caveat}."
    span = f"95% interval {_format_factor(speed.low)} to {_format_factor(speed.high)}"
    if not speed.is_significant:
        return f"{second} and {first} do not differ significantly in speed ({span}){caveat}."
    much = speed.ratio if speed.ratio > 1 else 1 / speed.ratio
    faster, slower = (second, first) if speed.ratio > 1 else (first, second)
    if speed.ratio < 1:
        span = f"95% interval {_format_factor(1 / speed.high)} to {_format_factor(1 / speed.low)}"
    hosts = [run.environment.get("hostname") or "?" for run in runs]
    if hosts[0] != hosts[1]:
        caveat = f"but they ran on different machines ({hosts[0]} and {hosts[1]})"
    elif busy:
        caveat = f"but the machine was busy: {busy}"
    else:
        caveat = "but they ran once each: the load of the machine may be the reason"
    return f"{faster} is {_format_factor(much)} times as fast as {slower} ({span}), {caveat}."


def _busy_phrases(runs: tuple[Run, Run], names: tuple[str, str]) -> list[str]:
    """Return a phrase for each run whose rank 0 often waited for a core."""
    waits = [number_or((run.end or {}).get("core_wait"), 0.0) for run in runs]
    return [
        f"rank 0 of {name} waited for a core {format_percent(wait)} of the time"
        for name, wait in zip(names, waits, strict=True)
        if wait > BUSY
    ]


def _format_factor(value: float) -> str:
    """Format a ratio with two decimals, or as an integer from 10 on."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


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
    "options.logger", "options.lr", "options.quiet", "options.schedule", "options.stages",
    "options.workers",
}  # fmt: skip


def settings_sentences(first: Run, second: Run, *, is_same: bool) -> list[str]:
    """Return sentences about settings and processors that may explain different results."""
    if is_same:
        return []
    differences = [
        f"{name} ({' and '.join(values)})"
        for name, values in find_setting_differences([first, second]).items()
        if all(values)  # a record of another version may lack a setting
        and (name == RATE or (name.startswith(DECISIVE) and name not in INDECISIVE))
    ]
    other = describe_other_arithmetic(first.environment, second.environment)
    sentences = [f"{other}."] if other else []
    if not differences:
        return sentences
    hidden = f" and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    named = ", ".join(differences[:MAX_NAMED])
    return [*sentences, f"These settings differ and can change results: {named}{hidden}."]


def _loss_sentences(losses: LossDifference, first: str, second: str) -> list[str]:
    """Return the sentence about the losses."""
    if not losses.num_compared:
        return ["They have no steps in common, so their losses cannot be compared."]
    if losses.step is None:
        return [f"Their losses are bit-identical at all {losses.num_compared:,} common steps."]
    return [
        f"Their losses first differ at step {losses.step:,}: {losses.second!r} in {second} and "
        f"{losses.first!r} in {first} ({losses.num_compared:,} steps compared)."
    ]


def _bisect_sentences(first: Run, second: Run, *, is_same: bool) -> list[str]:
    """Return the sentence about the command that finds the first difference, if there is one."""
    counts = {run.layout.get("microbatches") for run in (first, second)}
    if is_same or len(counts) > 1:
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
        "samples/s",
        "per step",
        "digest of weights",
    ]
    rows = []
    for name, one, speed in zip(
        comparison.names, comparison.summaries, comparison.speeds, strict=True
    ):
        cells = [
            format_metric_value(metric, one.metrics.get(metric, math.nan)) for metric in metrics
        ]
        figures = [
            *cells,
            format_loss(one.loss),
            format_number(speed),
            format_duration(one.step_seconds),
        ]
        rows.append([name, STATE_NAMES[one.state], one.layout, *figures, one.digest[:12]])
    return names, rows


def comparison_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    runs = [
        {"name": name, "samples_per_second": _finite(speed), "digest": one.digest}
        for name, one, speed in zip(
            comparison.names, comparison.summaries, comparison.speeds, strict=True
        )
    ]
    against = [
        {
            "name": pair.name,
            "speed_ratio": _finite(pair.speed.ratio),
            "interval": [_finite(pair.speed.low), _finite(pair.speed.high)],
            "significant": pair.speed.is_significant,
            "same_digest": pair.same_digest,
            "steps_compared": pair.losses.num_compared,
            "losses_part_at": pair.losses.step,
            "sentences": pair.sentences,
        }
        for pair in comparison.pairs
    ]
    return {"runs": runs, "against": against, "differs": comparison.settings}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
