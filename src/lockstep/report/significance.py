"""Which of two runs is faster, judged by the spread of their steps.

Steps that follow one another are alike (a busy machine is busy for a while), so
they are no independent samples: a test that took them so would find differences
that are not there. Hence

    1. seconds a sample, step by step; the first steps, which warm up, are dropped
    2. how long steps remember: the integrated autocorrelation time of their ranks
       (ranks, so that one step of a minute does not hide the rest)
    3. blocks of steps longer than that memory, each reduced to its median
    4. the ratio of the medians of the blocks, its 95% interval by resampling the
       blocks, and the chance of so large a ratio if the blocks were exchangeable

A difference between two single runs is also a difference between two moments of
a machine; only repeated runs tell these apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.record.reader import Run

__all__ = ["Pace", "Verdict", "compare_paces", "memory_of", "pace"]

Column = npt.NDArray[np.float64]

WARM = 0.05  # share of the steps that are taken as warming up,
WARM_AT_MOST = 20  # and how many at most
BLOCKS = 100  # blocks at most
ENOUGH = 6  # blocks below which nothing is said
DRAWS = 4000  # resamplings
CHANCE = 0.05


@dataclass(frozen=True)
class Pace:
    """A run's pace: median seconds a sample and a step, and the medians of its blocks."""

    per_sample: float
    per_step: float
    blocks: Column

    @property
    def speed(self) -> float:
        """Samples a second."""
        return 1 / self.per_sample if self.per_sample > 0 else math.nan


@dataclass(frozen=True)
class Verdict:
    """How the second run's speed compares: `ratio` is second / first, with its 95% interval.

    `chance` is how often a ratio as far from 1 turns up where there is no
    difference. `known` is false where the steps are too few to tell.
    """

    ratio: float
    low: float
    high: float
    chance: float
    known: bool

    @property
    def significant(self) -> bool:
        """Whether the difference is more than the steps' spread explains."""
        return self.known and self.chance < CHANCE and not self.low <= 1 <= self.high


def pace(run: Run) -> Pace:
    """Return the pace of `run`."""
    steps = run.steps
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        samples = np.where(np.isfinite(steps.samples), steps.samples, 1.0)
        cost = steps.seconds / samples
    cost = cost[min(WARM_AT_MOST, math.ceil(WARM * len(cost))) :]
    cost = cost[np.isfinite(cost) & (cost > 0)]
    if not len(cost):
        return Pace(math.nan, math.nan, cost)
    seconds = steps.seconds[np.isfinite(steps.seconds)]
    return Pace(float(np.median(cost)), float(np.median(seconds)), block_medians(cost))


def block_medians(values: Column) -> Column:
    """Return the medians of blocks that are longer than the values' memory."""
    length = max(math.ceil(2 * memory_of(values)), math.ceil(len(values) / BLOCKS), 1)
    count = max(1, len(values) // length)
    return np.array([np.median(block) for block in np.array_split(values, count)])


def memory_of(values: Column) -> float:
    """Return how many steps long the values remember: their integrated autocorrelation time.

    1 for independent values. Taken of the values' ranks, up to the first lag
    that exceeds five times the sum so far.
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


def compare_paces(first: Pace, second: Pace) -> Verdict:
    """Compare two paces; the same input gives the same answer, the resampling is seeded."""
    known = min(len(first.blocks), len(second.blocks)) >= ENOUGH
    if not len(first.blocks) or not len(second.blocks):
        return Verdict(math.nan, math.nan, math.nan, 1.0, known=False)
    ours, theirs = np.log(first.blocks), np.log(second.blocks)
    # Seconds a sample: a smaller second is a faster one, hence first - second.
    observed = float(np.median(ours) - np.median(theirs))
    draw = np.random.default_rng(0)
    spread = resampled(draw, ours) - resampled(draw, theirs)
    low, high = np.quantile(spread, [0.025, 0.975])
    return Verdict(
        math.exp(observed), math.exp(low), math.exp(high), chance(draw, ours, theirs), known
    )


def resampled(draw: np.random.Generator, values: Column) -> Column:
    """Return the medians of `values` drawn again with replacement, many times."""
    drawn = draw.integers(0, len(values), (DRAWS, len(values)))
    return np.asarray(np.median(values[drawn], axis=1), np.float64)


def chance(draw: np.random.Generator, first: Column, second: Column) -> float:
    """Return how often a random relabelling parts the medians as far as they are."""
    together = np.concatenate([first, second])
    observed = abs(float(np.median(first) - np.median(second)))
    mixed = draw.permuted(np.broadcast_to(together, (DRAWS, len(together))), axis=1)
    apart = np.abs(
        np.median(mixed[:, : len(first)], axis=1) - np.median(mixed[:, len(first) :], axis=1)
    )
    return float((np.sum(apart >= observed - 1e-12) + 1) / (DRAWS + 1))
