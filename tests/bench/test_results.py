"""Results: the table and the JSON records."""

from __future__ import annotations

from lockstep.tools.bench.interleaved import Contender, Result
from lockstep.tools.bench.results import COLUMNS, header, record, rows
from lockstep.tools.bench.workload import Workload

WORKLOAD = Workload("all_reduce", 262144)


class Nobody:
    name, library = "nobody", "nobody 1.0"


def result(name, times, **more):
    return Result(Contender(name, Nobody()), WORKLOAD, 4, 1 << 20, times, **more)


FIRST = result("lockstep", (100.0,) * 9)
SECOND = result("gloo", (800.0, 1000.0, 1200.0), wrong=7)


def test_columns_are_those_of_nccl_tests_and_ours():
    assert header().splitlines()[0].split() == list(COLUMNS)


def test_error_is_shown_in_the_table():
    unable = Result(Contender("mpi", Nobody()), WORKLOAD, 4, 4, error="MPI has no AVG")
    assert rows([FIRST, unable])[1].split(maxsplit=1) == ["mpi", "error: MPI has no AVG"]
    assert rows([unable, FIRST])[1].endswith("-")


def test_json_record():
    found = record(SECOND, FIRST, "a machine", "lockstep bench all_reduce")
    assert found == {
        "backend": "gloo", "collective": "all_reduce", "size_bytes": 1 << 20, "count": 262144,
        "dtype": "float32", "op": "SUM", "in_place": True, "nprocs": 4, "calls": 3,
        "median_us": 1000.0, "p10_us": 840.0, "p90_us": 1160.0, "algbw_gbps": 1.0486,
        "busbw_gbps": 1.5729, "wrong": 7, "ratio": 10.0, "library": "nobody 1.0",
        "machine": "a machine", "command": "lockstep bench all_reduce",
    }  # fmt: skip


def test_bus_bandwidth_of_a_copy_is_its_algorithm_bandwidth():
    copied = Result(
        Contender("memcpy", FIRST.contender.runner, is_copy=True), WORKLOAD, 4, 1 << 20, (100.0,)
    )
    assert copied.busbw == copied.algbw
