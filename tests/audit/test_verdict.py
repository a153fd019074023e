"""The verdict on computations that differ, from their places and bits alone."""

from __future__ import annotations

import pytest

from lockstep.audit.verdict import Computation, Verdict, judge


def compute(text: str) -> list[Computation]:
    """Return the computations in "0A 1B 1A": rank 0 with result A, rank 1 with B, and with A."""
    return [Computation(int(one[0]), "host", 0, one[1], False) for one in text.split()]


@pytest.mark.parametrize(
    ("text", "culprit", "is_single"),
    [
        ("0A 1B 1B 1B 0B", 0, True),  # once
        ("0B 1A 1B 1B 0B 2B", 1, True),
        ("0A 1B 0A 0A 1B 1B 2B", 0, False),  # always, and a witness
        ("0A 1B 0C 0D 1B 1B", 0, False),  # other bits each time
    ],
)
def test_a_rank_with_other_results_than_all_others_is_wrong(text, culprit, is_single):
    computations = compute(text)
    verdict = judge(computations)
    assert verdict.kind == "fault"
    assert verdict.culprit is not None
    assert verdict.culprit.rank == culprit
    assert verdict.is_single == is_single


@pytest.mark.parametrize("text", ["0A 1B 0C 1D", "0A 0B 0C", "0A 1B 1C 0C 2C 1D"])
def test_results_that_agree_on_no_rank_depend_on_something_else(text):
    assert judge(compute(text)) == Verdict("state")


def test_as_many_on_either_side_cannot_be_decided():
    assert judge(compute("0A 1B 0A 0A 1B 1B")) == Verdict("split")


def test_on_one_rank_the_cores_are_compared():
    cores = [Computation(0, "host", core, bits, False) for core, bits in enumerate("ABBB")]
    verdict = judge([*cores, cores[0]])
    assert verdict.kind == "fault"
    assert verdict.culprit == cores[0]
    assert judge([*cores, cores[0]._replace(core=2)]).kind == "state"
