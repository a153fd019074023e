"""`lockstep bench all_reduce`: from the flags to the table, the JSON and the picture."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.comm import backend
from lockstep.kernel.errors import UsageError, WorkError
from lockstep.tools.bench.measured_collectives import COLLECTIVES
from lockstep.tools.bench.results import Measurement
from lockstep.tools.commands import bench
from lockstep.tools.report import terminal

FIELDS = {"backend", "collective", "size_bytes", "dtype", "nprocs", "median_us", "p10_us", "p90_us",
          "algbw_gbps", "busbw_gbps", "wrong", "machine", "command"}  # fmt: skip


def run(*flags):
    return CliRunner().invoke(bench.command, flags)


def test_a_measurement_from_flags_to_files(tmp_path):
    file = tmp_path / "a.json"
    picture = tmp_path / "a.svg"
    done = run("all_reduce", "--backend", "gloo", "-n", "1,2", "--sizes", "4,5,4K", "--seconds",
               "0.01", "--json", str(file), "--plot", str(picture))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "# all_reduce on 1 ranks" in done.output
    assert "# all_reduce on 2 ranks" in done.output
    records = json.loads(file.read_text())
    found = [(each["nprocs"], each["size_bytes"], each["backend"]) for each in records]
    sizes = (4, 8, 4096)
    assert found == [(n, s, name) for n in (1, 2) for s in sizes for name in ("gloo",)]
    for each in records:
        assert each.keys() >= FIELDS
        assert each["wrong"] == 0
        assert 0 < each["p10_us"] <= each["median_us"] <= each["p90_us"]
        assert (each["dtype"], each["op"]) == ("float32", "SUM")
    assert picture.read_text().startswith("<svg")


def test_a_row_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "terminal_width", lambda: 60)
    done = run("all_reduce", "--backend", "gloo", "--sizes", "4,64M", "--seconds", "0.001")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    table = [line for line in lines if line and not line.startswith("#")]
    assert max(map(len, table)) <= 60
    rows = [line.split() for line in table if line.lstrip().startswith(("4 ", "67108864 "))]
    assert [row[1] for row in rows] == ["gloo", "gloo"]
    names = re.split(r"  +", table[0].strip())
    assert [len(row) for row in rows] == [len(names)] * 2
    assert {"size (B)", "backend", "median (us)", "ratio"} <= set(names)


def test_every_collective_is_a_command_with_its_description():
    listed = run("--help").output
    for name, collective in COLLECTIVES.items():
        assert collective.description in listed
        assert collective.description in " ".join(run(name, "--help").output.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["all_reduce", "-n", "0"], "-n 0: expected numbers of ranks"),
        (["all_reduce", "-n", "2,x"], "-n 2,x: expected numbers of ranks"),
        (["all_reduce", "--sizes", "4,4x"], "'4x' is not a size"),
        (["all_reduce", "--backend", "mpi"], "MPI is only compared with"),
        (["all_reduce", "--vs", "gloo,glow"], "--vs glow: torch has no such backend here"),
        (["all_reduce", "--plot", "a.pdf"], "the suffix must be .svg"),
        (["all_reduce", "--json", "nowhere/a.json"], "no such folder: nowhere"),
        (["all_reduce", "--backend", "gloo", "--sizes", "900G"], "of memory"),
    ],
)
def test_invalid_options_raise_usage_error(flags, sentence):
    error = run(*flags).exception
    assert isinstance(error, UsageError)
    assert sentence in str(error)


def test_recorded_command_has_no_paths(monkeypatch):
    typed = ["x", "bench", "barrier", "--json", "/a/b", "-n", "2", "--plot=/c.svg", "--vs", "gloo"]
    monkeypatch.setattr("sys.argv", typed)
    assert bench.describe_command() == "lockstep bench barrier -n 2 --vs gloo"


def result(**more):
    return Measurement("gloo", "", "all_reduce", 2, 4, 1, **{"times": [], **more})


def test_wrong_results_raise():
    bench.check_results([result(times=[1.0])])
    with pytest.raises(WorkError, match="wrong results of gloo: 1 wrong element in checked calls"):
        bench.check_results([result(times=[1.0], wrong=1)])


def test_nothing_measured_raises():
    with pytest.raises(WorkError, match="nothing could be measured: no such dtype"):
        bench.check_results([result(error="no such dtype")])


def test_a_reference_other_than_lockstep_is_explained_unless_it_was_chosen(monkeypatch, capsys):
    monkeypatch.setattr(backend, "reason_unavailable", lambda: "it is not built: build it")
    monkeypatch.delenv("LOCKSTEP_BACKEND", raising=False)
    assert bench.find_reference_backend() == "gloo"
    told = "the reference is gloo, because the backend 'lockstep' is not available: it is not built"
    assert told in capsys.readouterr().err
    monkeypatch.setattr(backend, "reason_unavailable", lambda: None)
    monkeypatch.setenv("LOCKSTEP_BACKEND", "gloo")
    assert bench.find_reference_backend() == "gloo"
    assert capsys.readouterr().err == ""


needs_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py")
    or not Path(sys.executable).with_name("mpiexec").exists(),
    reason="mpi4py and MPICH are not installed",
)


@needs_mpi
@pytest.mark.parametrize(
    "collective",
    [
        # Each takes seconds: mpiexec starts the ranks anew.
        pytest.param(name, marks=[] if name in ("all_reduce", "scatter") else pytest.mark.stress)
        for name in COLLECTIVES
    ],
)
def test_mpi_is_correct_for_every_collective(collective, tmp_path):
    file = tmp_path / "a.json"
    flags = ["--backend", "gloo", "--vs", "mpi", "-n", "3", "--seconds", "0.001"]
    sizes = [] if collective == "barrier" else ["--sizes", "6000"]
    done = run(collective, *flags, *sizes, "--json", str(file))
    assert done.exit_code == 0, done.output
    gloo, mpi = json.loads(file.read_text())
    assert (gloo["wrong"], mpi["backend"], mpi["wrong"]) == (0, "mpi", 0)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_mpi
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo started; echo 'no slots available' >&2; exit 1", "output: no slots available"),
        ('shift 2\nexec "$@"', "each of the 2 ranks is alone in MPICH"),
    ],
)
def test_a_failing_mpiexec_is_quoted(tmp_path, monkeypatch, text, sentence):
    program = script(tmp_path / "mpiexec", text)
    monkeypatch.setattr(bench, "find_mpiexec", lambda: str(program))
    error = run("all_reduce", "--backend", "gloo", "--vs", "mpi", "--sizes", "4").exception
    assert isinstance(error, WorkError)
    assert sentence in str(error)


def test_mpiexec_beside_python_is_preferred_and_a_missing_one_named(tmp_path, monkeypatch):
    program = script(tmp_path / "mpiexec", "exit 0")
    (tmp_path / "mpi4py.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert bench.find_mpiexec() == str(program)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="pip install mpi4py mpich"):
        bench.find_mpiexec()
