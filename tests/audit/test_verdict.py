"""The verdict on computations that differ, from their places and bits alone."""

from __future__ import annotations

import pytest

from lockstep.audit.verdict import (
    Computation,
    Verdict,
    explain_processor,
    explain_program,
    find_blame,
    judge,
)


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
    assert verdict.votes == "fault"
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
    assert verdict.votes == "fault"
    assert verdict.culprit == cores[0]
    assert judge([*cores, cores[0]._replace(core=2)]).votes == "state"


BLAMED = """
    operator    fault     split     state
    program     program   program   program
    processor   one       two       several
    either      one       two       program
    none        one       two       program
"""
"""What is to blame, by what the operators say (rows) and by the votes (columns)."""


def read_table(text: str) -> list[tuple[str, str, str]]:
    """Return each cell of a table as its row, its column and its text."""
    header, *rows = (line.split() for line in text.split("\n") if line.strip())
    return [
        (row[0], column, cell)
        for row in rows
        for column, cell in zip(header[1:], row[1:], strict=True)
    ]


@pytest.mark.parametrize(("evidence", "votes", "blame"), read_table(BLAMED))
def test_votes_and_operators_say_together_what_is_to_blame(evidence, votes, blame):
    assert find_blame(votes, evidence) == blame


@pytest.mark.parametrize("votes", ["fault", "split", "state"])
def test_results_that_depend_on_earlier_ones_blame_the_program(votes):
    for evidence in ("program", "either", "none"):
        assert find_blame(votes, evidence, is_dependent=True) == "program"


@pytest.mark.parametrize(
    ("votes", "blame"), [("fault", "one"), ("split", "two"), ("state", "several")]
)
def test_an_operator_of_torch_with_other_results_blames_a_processor_by_the_votes(votes, blame):
    assert find_blame(votes, "processor", is_dependent=True) == blame


@pytest.mark.parametrize(
    ("text", "blame", "sentence"),
    [
        ("0A 1B 0A 0A 1B 1C", "one", "rank 1 (host host, core 0) computed wrong results"),
        (
            "0A 1B 0A 0A 1B 1B",
            "two",
            "rank 0 (host host, core 0) and rank 1 (host host, core 0) compute different results",
        ),
        (
            "0A 1B 0C 1D",
            "several",
            "rank 0 (host host, core 0) and rank 1 (host host, core 0) computed different results",
        ),
    ],
)
def test_the_sentence_about_processors_names_those_that_are_to_blame(text, blame, sentence):
    computations = compute(text)
    verdict = judge(computations)
    said = explain_processor(blame, "step 3", verdict, computations, ", first in aten.mm")
    assert said.startswith(f"step 3: {sentence}")
    assert "again and again, first in aten.mm" in said


def test_the_cores_of_a_rank_whose_every_result_differs_are_named_together():
    computations = [
        Computation(1, "host", core, bits, False)
        for core, bits in zip([3, 0, 3, 0], "ABCD", strict=True)
    ]
    verdict = judge(computations)
    said = explain_processor("several", "step 3", verdict, computations, "")
    assert said.startswith("step 3: rank 1 (host host, cores 0 and 3) computed different results")


def test_the_sentence_about_a_program_names_what_has_changed():
    said = explain_program(", first in aten.mm", "program", ["a.calls", "b", "c", "d"])
    assert "it differs, first in aten.mm; a.calls, b, c and 1 more changed meanwhile. The" in said


def test_an_operator_that_may_not_be_deterministic_is_named():
    said = explain_program(", first in my.operator", "either", [])
    assert said.endswith("is not deterministic, or this processor core is faulty")
