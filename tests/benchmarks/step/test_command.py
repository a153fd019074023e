"""`python -m benchmarks.step`: from the flags to the tables, the JSON and the picture."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from benchmarks.step import __main__ as program
from benchmarks.step.contenders import Case
from benchmarks.step.widths import Digests
from lockstep.kernel.errors import WorkError

FIELDS = {"contender", "network", "parameters", "optimizer", "nprocs", "samples", "microbatches",
          "median_ms", "p10_ms", "p90_ms", "beyond_ms", "memory_rank_bytes", "memory_host_bytes",
          "digest", "exact", "error", "machine", "command"}  # fmt: skip


def run(*flags):
    return CliRunner().invoke(program.command, [*flags])


def test_a_measurement_from_flags_to_files(tmp_path):
    file = tmp_path / "a.json"
    picture = tmp_path / "a.svg"
    done = run("--models", "tiny", "--optimizers", "sgd", "--vs", "memcpy,ddp-gloo,shared",
               "--batch", "6", "--microbatches", "3", "--seconds", "0.01", "--rounds", "6",
               "--block", "0.01", "--widths", "1,2,3", "--json", str(file), "--plot",
               str(picture))  # fmt: skip
    assert done.exit_code == 0, (done.output, done.exception)
    assert "# 1 cases, 5 contenders, 2 ranks: about a minute" in done.output
    assert "6 samples per rank in 3 micro-batches" in done.output
    records = json.loads(file.read_text())
    steps = [each for each in records if each["benchmark"] == "step"]
    names = ["alone", "copies", "memcpy", "ddp-gloo", "shared"]
    assert [each["contender"] for each in steps] == names
    for each in steps:
        assert each.keys() >= FIELDS
        assert 0 < each["p10_ms"] <= each["median_ms"] <= each["p90_ms"]
    assert steps[4]["exact"]
    cost, digests = records[5:]
    assert cost["exact"]["median_ms"] > 0
    assert cost["any_order"]["median_ms"] > 0
    assert set(digests["ranks"]) == {"1", "2", "3"}
    assert set(digests["ranks"].values()) == {digests["plain"]}
    assert "shared minus ddp-gloo: " in done.output
    # A contender has more rounds than were asked for if they took less than --seconds.
    assert re.search(r"; ([6-9]|\d\d+) pairs", done.output)
    assert "all equal" in done.output
    assert picture.read_text().startswith("<svg")


def test_digests_that_differ_are_a_failure():
    digests = Digests(Case("tiny", "sgd", 27, 8), "trainer", "a", {1: "a", 2: "b"})
    with pytest.raises(WorkError, match=r"wrong parameters from trainer on 1, 2 ranks"):
        program.judge([], [digests])
