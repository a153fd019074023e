"""Bisect finds what was planted, with real runs and replays of both."""

from __future__ import annotations

import pytest

from lockstep.replay.bisection import bisect_runs
from lockstep.replay.bisection_report import bisection_json, sentences
from planted import MICROBATCH, PLANTED, SCRIPT, STEP, Planted, record, replace


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def recorded(folder):
    """Record a script once: recorded(source, name, environ, ranks)."""
    runs = {}

    def get(source, name="plain", environ=None, ranks=1):
        if (source, name) not in runs:
            runs[source, name] = record(folder, name, source, environ, ranks)
        return runs[source, name]

    return get


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            each,
            id=each.name,
            marks=[] if each.is_quick else [pytest.mark.stress, pytest.mark.timeout(300)],
        )
        for each in PLANTED
    ],
)
def test_a_planted_difference_is_found_and_named(recorded, planted: Planted):
    first, second = planted.sources()
    a = recorded(first, "plain" if first == SCRIPT else f"plain, {planted.name}")
    found = bisect_runs(a, recorded(second, planted.name, planted.environ))
    assert planted.check(found) == []
    assert found.remarks == ()
    is_exact = planted.name != "a non-deterministic operator"
    assert [each.is_exact for each in found.reproductions] == [is_exact] * 2
    assert [each.is_repeatable for each in found.reproductions] == [None if is_exact else False] * 2


def test_there_are_twenty():
    assert len({each.name for each in PLANTED}) == 20
    assert {each.direction for each in PLANTED if each.is_quick} == {
        "data", "state", "forward", "backward", "reduction", "optimizer",
    }  # fmt: skip


LOOSE_WIRE = {
    "        return nn.functional.dropout": """\
        if is_here(2) and "LOOSE_WIRE" in os.environ:
            y.detach().numpy().view(numpy.int32)[1, 6] ^= 1 << 18
        return nn.functional.dropout"""
}


def test_a_bit_that_only_the_recorded_run_had_flipped(recorded):
    """The replay of that run has the bits of the other one, and the finding says what it means."""
    source = replace(SCRIPT, LOOSE_WIRE)
    a, b = recorded(SCRIPT), recorded(source, "loose", {"LOOSE_WIRE": "1"})
    found = bisect_runs(a, b)
    finding = found.finding
    assert finding is not None
    assert not found.is_replayed
    assert (finding.step, finding.microbatch, finding.direction) == (STEP, MICROBATCH, "forward")
    first, second = found.reproductions
    assert (first.is_exact, second.is_exact, second.is_repeatable) == (True, False, True)
    text = " ".join(sentences(found))
    assert "Replays of plain compute what was recorded, bit for bit." in text
    assert "The replay of loose does not compute what was recorded: step 4, micro-batch 2" in text
    assert "Two replays agree with each other" in text
    assert "a fault of its machine" in text
    assert bisection_json(found)["reproduced"] == [True, False]


def test_layouts_of_one_training_have_no_difference_and_hide_none(recorded):
    alone, four = recorded(SCRIPT), recorded(SCRIPT, "four", ranks=4)
    found = bisect_runs(alone, four)
    assert found.equal
    assert found.compared.steps == 8
    assert found.compared.digests == (3, 6, 8)
    planted = next(each for each in PLANTED if each.direction == "optimizer" and each.is_quick)
    other = recorded(planted.sources()[1], planted.name)
    assert planted.check(bisect_runs(four, other)) == []
