"""Pairs: differences of blocks of the same round, the interval of their median, and memcpy."""

from __future__ import annotations

import pytest

from benchmarks.step.answers import Answer
from benchmarks.step.comparison import Outcome, StepParticipant, take_turns
from benchmarks.step.contenders import CONTENDERS, Case
from benchmarks.step.pairs import median_interval, pair_lines

CASE = Case("25m", "sgd", 32)


def outcome(name, blocks):
    answer = Answer("0123", True, 0.0) if CONTENDERS[name].average else None
    return Outcome(name, CASE, 2, sorted(blocks), answer, blocks=blocks)


@pytest.mark.parametrize(("number", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (30, 10)])
def test_the_interval_has_the_ranks_of_the_sign_test(number, rank):
    values = [float(value) for value in range(number, 0, -1)]
    assert median_interval(values) == (rank, number + 1 - rank)


def test_drift_that_affects_both_of_a_pair_does_not_show():
    drift = [0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06]
    copies, trainer = ([base + each for each in drift] for base in (0.080, 0.100))
    both = [outcome("copies", copies), outcome("memcpy", [0.010] * 7), outcome("trainer", trainer)]
    (line,) = pair_lines(both)
    assert line.startswith("trainer minus copies: +20.00 ms (+20.00 to +20.00), ")
    assert line.endswith(", +2.00 memcpy (+2.00 to +2.00); 7 pairs")


def test_neighbors_are_compared_and_the_larger_number_of_blocks_is_cut():
    both = [outcome("ddp-gloo", [0.2] * 8), outcome("shared", [0.1] * 6)]
    (line,) = pair_lines(both)
    assert line == (
        "shared minus ddp-gloo: -100.00 ms (-100.00 to -100.00), 2.000 times as fast; 6 pairs"
    )


def test_few_pairs_have_no_interval():
    assert pair_lines([outcome("ddp-gloo", [0.2] * 5), outcome("shared", [0.1] * 9)]) == []


class Rising:
    """Two ranks whose steps take longer in each block."""

    def __init__(self):
        self.seconds = 0

    def ask(self, message):
        self.seconds += 1
        return [{"times": [self.seconds * 10**9] * message["block"]}] * 2


def test_blocks_stay_in_the_order_of_the_rounds():
    one = StepParticipant(
        Outcome("copies", CASE, 2), CONTENDERS["copies"], Rising(), calls=3, least_rounds=12
    )
    take_turns([one], 0.1, lambda text: None)
    assert one.outcome.blocks == [float(number) for number in range(1, 13)]
