"""`lockstep bench all_reduce`: from the flags to the table, the JSON and the picture."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lockstep.bench.collectives import COLLECTIVES
from lockstep.bench.measure import Order
from lockstep.bench.peers import CopyPeer
from lockstep.bench.rounds import Contender, Result
from lockstep.commands import bench, bench_collective
from lockstep.errors import UsageError, WorkError

FIELDS = {"backend", "collective", "size_bytes", "dtype", "nprocs", "median_us", "p10_us", "p90_us",
          "algbw_gbps", "busbw_gbps", "wrong", "machine", "command"}  # fmt: skip


def run(*flags):
    return CliRunner().invoke(bench.command, flags)


def test_a_measurement_from_flags_to_files(tmp_path):
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
    done = run("all_reduce", "--backend", "gloo", "-n", "1,2", "--sizes", "4,5,4K", "--seconds",
               "0.01", "--op", "max", "--json", str(file), "--plot", str(picture))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "# all_reduce on 1 ranks" in done.output
    assert "# all_reduce on 2 ranks" in done.output
    records = json.loads(file.read_text())
    found = [(each["nprocs"], each["size_bytes"], each["backend"]) for each in records]
    sizes = (4, 8, 4096)
    assert found == [(n, s, name) for n in (1, 2) for s in sizes for name in ("gloo", "memcpy")]
    for each in records:
        assert each.keys() >= FIELDS
        assert each["wrong"] == 0
        assert 0 < each["p10_us"] <= each["median_us"] <= each["p90_us"]
        assert (each["dtype"], each["op"]) == ("float32", "MAX")
    assert picture.read_text().startswith("<svg")


def test_every_collective_is_a_command_with_its_sentence():
    listed = run("--help").output
    for name, collective in COLLECTIVES.items():
        assert collective.sentence in listed
        assert collective.sentence in " ".join(run(name, "--help").output.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["all_reduce", "-n", "0"], "-n 0: write a number of ranks"),
        (["all_reduce", "-n", "2,x"], "-n 2,x: write a number of ranks"),
        (["all_reduce", "-b", "4x"], "'4x' is no size"),
        (["all_reduce", "-b", "8", "-e", "4"], "from 8 to 4 bytes"),
        (["all_reduce", "--op", "band"], "BAND works on bits"),
        (["all_reduce", "--op", "avg", "--dtype", "int32"], "AVG of int32"),
        (["all_reduce", "--seconds", "0"], "--seconds and --timeout"),
        (["all_reduce", "--plot", "a.pdf"], "write a .svg or a .png"),
        (["all_reduce", "--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["all_reduce", "--backend", "gloo", "--sizes", "900G"], "of memory"),
        (["barrier", "--vs", "mpi", "--mpi-python", "/nowhere"], "/nowhere is no program"),
    ],
)
def test_nonsense_is_used_wrongly(flags, sentence):
    error = run(*flags).exception
    assert isinstance(error, UsageError)
    assert sentence in str(error)


def test_the_command_is_recorded_without_places_of_files(monkeypatch):
    typed = ["x", "bench", "barrier", "--json", "/a/b", "-n", "2", "--plot=/c.svg", "--vs", "gloo"]
    monkeypatch.setattr("sys.argv", typed)
    assert bench_collective.spoken_command() == "lockstep bench barrier -n 2 --vs gloo"


def result(**more):
    order = Order("all_reduce", 1, "float32", "SUM")
    return Result(Contender("memcpy", CopyPeer()), order, 2, 4, **more)


def test_wrong_answers_are_a_failure():
    bench_collective.judge([result(times=(1.0,))])
    with pytest.raises(WorkError, match="wrong answers from memcpy"):
        bench_collective.judge([result(times=(1.0,), wrong=1)])


def test_nothing_measured_is_a_failure():
    with pytest.raises(WorkError, match="nothing could be measured: no such dtype"):
        bench_collective.judge([result(cannot="no such dtype")])
