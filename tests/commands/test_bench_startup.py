"""`lockstep bench startup`: measured launches, records, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.commands import bench_startup
from lockstep.commands.bench_startup import StartTimes, command, measure
from lockstep.kernel.errors import FileError, UsageError, WorkError


def test_a_start_of_each_launcher_is_timed_and_written(tmp_path, monkeypatch):
    counts: list[str] = []

    def starts(nprocs, script):
        assert "init_process_group" in script.read_text()
        names = ("lockstep run", "torchrun")
        return {name: lambda name=name: counts.append(f"{name} {nprocs}") for name in names}

    monkeypatch.setattr(bench_startup, "_starts", starts)
    file = tmp_path / "startup.json"
    done = CliRunner().invoke(command, ["-n", "3,2", "--repeats", "2", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "3 ranks, median of 2 starts" in done.output
    assert "1.00 of torchrun" in done.output
    rounds = [["lockstep run 3", "torchrun 3"] * 3, ["lockstep run 2", "torchrun 2"] * 3]
    assert counts == [*rounds[0], *rounds[1]]  # in turn, the first round not counted
    records = json.loads(file.read_text())
    assert all("cores" in record["machine"] and record["command"] for record in records)
    assert [(r["launcher"], r["nprocs"], len(r["seconds"])) for r in records] == [
        ("lockstep run", 3, 2),
        ("torchrun", 3, 2),
        ("lockstep run", 2, 2),
        ("torchrun", 2, 2),
    ]


@pytest.mark.parametrize(
    "launcher", ["lockstep run", pytest.param("torchrun", marks=pytest.mark.stress)]
)
def test_a_launcher_starts_the_script(tmp_path, launcher):
    script = tmp_path / "join.py"
    starts = bench_startup._starts(1, script)
    script.write_text(bench_startup.SCRIPT + "open('joined', 'a').write('x')\n")
    starts[launcher]()
    assert (tmp_path / "joined").read_text() == "x"


def test_a_launch_from_the_program_itself():
    assert bench_startup._starts(2, Path())["lockstep.launch, again"]() == [None, None]


def test_a_launcher_that_fails_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_startup, "SCRIPT", "raise SystemExit('no luck')")
    with pytest.raises(WorkError, match=r"run --nproc-per-node 1 .* failed with status 1: .*log"):
        list(measure(1, 1))


def test_the_median_is_the_middle():
    assert StartTimes("x", 2, (3.0, 1.0, 2.0)).record()["median_seconds"] == 2.0


def test_unwritable_file_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_startup, "_starts", lambda nprocs, script: {"torchrun": int})
    result = CliRunner().invoke(command, ["-n", "1", "--json", str(tmp_path / "no" / "file")])
    assert isinstance(result.exception, FileError)


@pytest.mark.parametrize("flags", [["--repeats", "0"], ["-n", "0"]])
def test_invalid_options_raise_usage_error(flags):
    result = CliRunner().invoke(command, flags)
    assert isinstance(result.exception, UsageError)
