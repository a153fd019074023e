"""`python -m benchmarks.step`: from the flags to the tables, the JSON and the picture."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from benchmarks.step import __main__ as program
from benchmarks.step.contenders import Case
from benchmarks.step.widths import Digests
from lockstep.comm import backend
from lockstep.kernel.errors import UsageError, WorkError

FIELDS = {"contender", "network", "parameters", "optimizer", "nprocs", "samples", "microbatches",
          "median_ms", "p10_ms", "p90_ms", "beyond_ms", "memory_rank_bytes", "memory_host_bytes",
          "digest", "exact", "error", "machine", "command"}  # fmt: skip


def run(*flags):
    return CliRunner().invoke(program.command, [*flags])


def test_a_measurement_from_flags_to_files(tmp_path):
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
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


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--models", "7b"], "--models 7b: choose from tiny,1m,25m,"),
        (["--optimizers", "lion"], "--optimizers lion: choose from sgd,adamw"),
        (["--vs", "horovod"], "--vs horovod: choose from copies,memcpy,ddp-gloo"),
        (["-n", "0"], "-n 0: expected a number of ranks"),
        (["--batch", "32", "--microbatches", "5"], "--microbatches 5: a rank's samples"),
        (["--seconds", "0"], "--seconds and --timeout"),
        (["--rounds", "0"], "--rounds is at least 1"),
        (["--block", "0"], "--block a positive number"),
        (["--plot", "a.pdf"], "the suffix must be .svg or .png"),
        (["--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["-n", "999", "--models", "tiny,100m"], "100m with adamw on 999 ranks"),
    ],
)
def test_invalid_options_raise_usage_error(flags, sentence):
    error = run(*flags).exception
    assert isinstance(error, UsageError), error
    assert sentence in str(error)


def test_without_the_native_backend_what_needs_it_is_left_out_or_refused(monkeypatch, capsys):
    monkeypatch.setattr(backend, "reason_unavailable", lambda: "not built")
    names = program.contenders("all")
    assert "ddp-gloo" in names
    assert "trainer" in names
    assert not [name for name in names if "lockstep" in name or "zero-copy" in name]
    assert "without ddp-lockstep" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"--vs fsdp-lockstep needs .*not built"):
        program.contenders("ddp-gloo,fsdp-lockstep")


def test_the_estimate_grows_with_what_is_asked_for():
    small, large = Case("1m", "sgd", 32), Case("100m", "adamw", 32)
    one = program.estimate([small], ["copies"], [2], [1], 1.0)
    assert program.estimate([small, large], ["copies"], [2], [1], 1.0) > 2 * one
    assert program.estimate([small], ["copies", "trainer"], [2, 4], [1], 1.0) > one
    assert program.about(40.0) == "about a minute"
    assert program.about(290.0) == "about 5 minutes"


def test_the_default_run_stays_under_five_minutes():
    cases = [Case(m, o, 32) for m in program.MODELS.split(",") for o in ("sgd", "adamw")]
    names = program.contenders("all")
    assert program.estimate(cases, names, [2], [1, 2, 3, 4], 1.0) < 300


def test_digests_that_differ_are_a_failure():
    digests = Digests(Case("tiny", "sgd", 27, 8), "trainer", "a", {1: "a", 2: "b"})
    with pytest.raises(WorkError, match=r"wrong parameters from trainer on 1, 2 ranks"):
        program.judge([], [digests])
