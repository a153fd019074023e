"""The tables: times beyond the copies, shares, digests, and who is wrong."""

from __future__ import annotations

import json

import pytest

from benchmarks.step import table
from benchmarks.step.answers import Answer
from benchmarks.step.comparison import Outcome
from benchmarks.step.contenders import Case
from benchmarks.step.exactness import Exactness
from benchmarks.step.widths import Digests

CASE = Case("25m", "sgd", 32)
RIGHT, ROUNDED = Answer("0123456789ab", True, 0.0), Answer("ffff00000000", False, 2e-6)


def outcome(name, seconds, answer=None, **more):
    return Outcome(name, CASE, 2, [seconds], answer, 200_000_000, 400_000_000, **more)


FIELD = [
    outcome("alone", 0.070),
    outcome("copies", 0.080),
    outcome("memcpy", 0.005),
    outcome("ddp-gloo", 0.180, ROUNDED),
    outcome("trainer", 0.100, RIGHT),
    outcome("stock-copies", 0.110),
    outcome("stock-ddp-gloo", 0.190, ROUNDED),
]


def test_a_line_says_what_comes_beyond_the_copies():
    lines = {line.split()[0]: line.split()[1:] for line in table.rows(FIELD)}
    assert lines["trainer"] == ["100.0"] * 3 + [
        "+20.0", "0.20", "1.80", "200", "400", "01234567", "=", "0",
    ]  # fmt: skip
    assert lines["ddp-gloo"][3:6] == ["+100.0", "1.00", "1.00"]
    assert lines["stock-ddp-gloo"][3] == "+80.0"  # beyond the copies of its own kind
    assert lines["alone"] == ["70.0"] * 3 + ["-", "-", "-", "200", "400", "-", "-"]
    assert lines["copies"][3:6] == lines["memcpy"][3:6] == ["-"] * 3


def test_columns_stand_under_their_names():
    heading = table.heading(FIELD).splitlines()[-1]
    assert all(len(line) <= len(heading) for line in table.rows(FIELD))
    assert "25.2 M parameters; 2 ranks, 32 samples per rank in 1 micro-batch\n" in table.heading(
        FIELD
    )


def test_without_copies_or_gloo_there_is_nothing_to_compare_with():
    (line,) = table.rows(FIELD[4:5])
    assert line.split()[4:7] == ["-", "-", "-"]


def test_error_is_shown_in_the_table():
    (line,) = table.rows([Outcome("trainer", CASE, 2, error="no luck")])
    assert line == "trainer  error: no luck".replace("trainer", f"{'trainer':<18}".rstrip())


def test_the_trainer_must_hit_every_bit_and_others_come_near():
    equal = Digests(CASE, "trainer", "a", {1: "a", 3: "a"})
    assert not table.wrong(FIELD, [equal])
    bad = [outcome("trainer", 0.1, ROUNDED), outcome("ddp-gloo", 0.1, Answer("0", False, 0.3))]
    other = Digests(CASE, "trainer", "a", {1: "a", 3: "b"})
    assert table.wrong(bad, [other]) == [
        "trainer (25m, sgd)", "ddp-gloo (25m, sgd)", "trainer on 1, 3 ranks (25m, sgd)",
    ]  # fmt: skip
    (same,), (differs,) = table.widths_lines([equal]), table.widths_lines([other])
    assert same == "25m, sgd, trainer: plain a, 1: a, 3: a  all equal"
    assert differs.endswith("3: b  DIFFERENT")


def test_records_hold_all_that_was_measured():
    cost = Exactness(CASE, 2, "lockstep", [0.022, 0.024], [0.020, 0.020])
    digests = Digests(CASE, "trainer", "a", {1: "a"})
    about = {"machine": "m", "command": "c"}
    found = json.loads(json.dumps(table.records(FIELD, [cost], [digests], about)))
    assert [each["benchmark"] for each in found] == ["step"] * 7 + ["exactness", "step digests"]
    trainer, exact = found[4], found[7]
    assert (trainer["beyond_ms"], trainer["share_of_ddp_gloo"], trainer["speedup"]) == (
        20,
        0.2,
        1.8,
    )
    assert (trainer["parameters"], trainer["exact"]) == (25_178_112, True)
    assert exact["cost"] == pytest.approx(0.15)
    assert exact["exact"]["median_ms"] == pytest.approx(23)
    assert "+15%" in table.exactness_line(cost)
    assert found[8]["ranks"] == {"1": "a"}
    assert all(each["machine"] == "m" for each in found)
