"""Pairs: blocks of two contenders in the same round, compared with each other and with memcpy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.step.comparison import MEMCPY, Outcome
from benchmarks.step.table import baseline

__all__ = ["median_interval", "pair_lines"]

CONFIDENCE = 0.95
FEWEST = 6  # pairs whose whole range covers the median with this confidence


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return two of the values, between which the median lies with a confidence of 95%.

    No distribution is assumed: the number of values below the median is binomial. At least
    `FEWEST` values.
    """
    ordered = sorted(values)
    number = len(values)
    assert number >= FEWEST
    outside = 0.0
    rank = 0
    while True:
        outside += 2 * math.comb(number, rank) / 2**number
        if outside > 1 - CONFIDENCE:
            return ordered[rank - 1], ordered[number - rank]
        rank += 1


def pair_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line for each contender and its copies, and one for each two neighbors."""
    blocks = {each.name: each.blocks for each in outcomes if not each.error}
    answered = [each for each in outcomes if each.answer and not each.error]
    pairs = [(each.name, baseline(each)) for each in answered if baseline(each) in blocks]
    pairs += [(after, before) for before, after in pairwise(each.name for each in answered)]
    copy = statistics.median(blocks[MEMCPY]) if blocks.get(MEMCPY) else 0.0
    lines = []
    for one, other in pairs:
        both = list(zip(blocks[one], blocks[other], strict=False))  # one may have had more rounds
        if len(both) < FEWEST:
            continue
        differences = [mine - theirs for mine, theirs in both]
        low, high = median_interval(differences)
        middle = statistics.median(differences)
        ratio = statistics.median(theirs / mine for mine, theirs in both)
        text = (
            f"{one} minus {other}: {1e3 * middle:+.2f} ms "
            f"({1e3 * low:+.2f} to {1e3 * high:+.2f}), {ratio:.3f} times as fast"
        )
        if copy:
            text += f", {middle / copy:+.2f} memcpy ({low / copy:+.2f} to {high / copy:+.2f})"
        lines.append(f"{text}; {len(both)} pairs")
    return lines
