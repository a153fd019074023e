"""Whether the speeds of two runs differ significantly.

Consecutive steps are correlated (a busy machine stays busy for a while), so a test that
treats them as independent samples finds differences that do not exist. Therefore:

    1. Take the seconds per sample of each step, without the warm-up steps.
    2. Estimate the integrated autocorrelation time of their ranks by size (ranks, so that a single
       step of a minute does not dominate the estimate).
    3. Divide the steps into blocks of at least twice that length, and take the blocks' medians.
    4. Compare the medians of the blocks: their ratio, its 95% bootstrap interval, and the
       p-value of a permutation test.

Two single runs also differ because of the machine's load, which only repeated runs can show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.record.columns import Column
from lockstep.record.reader import Run

__all__ = ["Significance", "StepTimes", "autocorrelation_time", "compare_speeds", "step_times"]


WARMUP_FRACTION = 0.05  # fraction of the steps that is dropped
MAX_WARMUP_STEPS = 20
MAX_BLOCKS = 100
MIN_BLOCKS = 6  # minimum number of blocks for a conclusion
NUM_RESAMPLES = 4000
MAX_P_VALUE = 0.05  # p-value below which a difference is significant


@dataclass(frozen=True)
class StepTimes:
    """The median seconds per sample and per step, and the medians of the blocks of steps."""

    per_sample: float
    per_step: float
    blocks: Column

    @property
    def speed(self) -> float:
        """The speed in samples per second."""
        return 1 / self.per_sample if self.per_sample > 0 else math.nan


@dataclass(frozen=True)
class Significance:
    """The ratio of the second run's speed to the first one's, with its 95% interval.

    `p_value` is the probability of a ratio at least as far from 1 if there is no difference.
    `is_known` is False if there are too few steps for a conclusion.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    is_known: bool

    @property
    def is_significant(self) -> bool:
        """Whether the variation of the steps does not explain the difference."""
        return self.is_known and self.p_value < MAX_P_VALUE and not self.low <= 1 <= self.high


def step_times(run: Run) -> StepTimes:
    """Return the durations of the steps of a run, in its last layout."""
    steps = run.layout_steps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        samples = np.where(np.isfinite(steps.samples), steps.samples, 1.0)
        cost = steps.seconds / samples
    cost = cost[min(MAX_WARMUP_STEPS, math.ceil(WARMUP_FRACTION * len(cost))) :]
    cost = cost[np.isfinite(cost) & (cost > 0)]
    if not len(cost):
        return StepTimes(math.nan, math.nan, cost)
    seconds = steps.seconds[np.isfinite(steps.seconds)]
    return StepTimes(float(np.median(cost)), float(np.median(seconds)), _block_medians(cost))


def _block_medians(values: Column) -> Column:
    """Return the medians of blocks of at least twice the autocorrelation time, at most 100."""
    length = max(
        math.ceil(2 * autocorrelation_time(values)), math.ceil(len(values) / MAX_BLOCKS), 1
    )
    count = max(1, len(values) // length)
    return np.array([np.median(block) for block in np.array_split(values, count)])


def autocorrelation_time(values: Column) -> float:
    """Return the integrated autocorrelation time of the ranks (by size) of `values`, in steps.

    It is 1 for independent values. The sum ends at the first lag that is at least five times the
    sum so far.
    """
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[which] - (len(values) - 1) / 2
    size = 1 << (2 * len(ranks) - 1).bit_length()
    power = np.abs(np.fft.rfft(ranks, size)) ** 2
    correlation = np.fft.irfft(power, size)[: len(ranks)]
    if not correlation[0] > 0:
        return 1.0
    sums = 2 * np.cumsum(correlation / correlation[0]) - 1
    lags = np.arange(len(sums))
    beyond = np.flatnonzero(lags >= 5 * sums)
    return max(1.0, float(sums[beyond[0]] if len(beyond) else sums[-1]))


def compare_speeds(first: StepTimes, second: StepTimes) -> Significance:
    """Compare the speeds of two runs; resampling is seeded, so the result is reproducible."""
    is_known = min(len(first.blocks), len(second.blocks)) >= MIN_BLOCKS
    if not len(first.blocks) or not len(second.blocks):
        return Significance(math.nan, math.nan, math.nan, 1.0, is_known=False)
    ours, theirs = np.log(first.blocks), np.log(second.blocks)
    # Fewer seconds per sample mean a higher speed, hence first - second.
    observed = float(np.median(ours) - np.median(theirs))
    generator = np.random.default_rng(0)
    spread = _bootstrap_medians(generator, ours) - _bootstrap_medians(generator, theirs)
    low, high = np.quantile(spread, [0.025, 0.975])
    return Significance(
        math.exp(observed),
        math.exp(low),
        math.exp(high),
        _permutation_p_value(generator, ours, theirs),
        is_known,
    )


def _bootstrap_medians(generator: np.random.Generator, values: Column) -> Column:
    """Return the medians of many bootstrap samples of `values`."""
    drawn = generator.integers(0, len(values), (NUM_RESAMPLES, len(values)))
    return np.asarray(np.median(values[drawn], axis=1), np.float64)


def _permutation_p_value(generator: np.random.Generator, first: Column, second: Column) -> float:
    """Return the fraction of random relabelings that separate the medians at least as far."""
    together = np.concatenate([first, second])
    observed = abs(float(np.median(first) - np.median(second)))
    mixed = generator.permuted(np.broadcast_to(together, (NUM_RESAMPLES, len(together))), axis=1)
    apart = np.abs(
        np.median(mixed[:, : len(first)], axis=1) - np.median(mixed[:, len(first) :], axis=1)
    )
    return float((np.sum(apart >= observed - 1e-12) + 1) / (NUM_RESAMPLES + 1))
