"""Results: the table and the JSON records."""

from __future__ import annotations

import pytest

from lockstep.tools.bench.results import Measurement, record, rows


def result(name, times, **more):
    return Measurement(name, "nobody 1.0", "all_reduce", 4, 1 << 20, 262144, times, **more)


FIRST = result("lockstep", [100.0] * 9)
SECOND = result("gloo", [800.0, 1000.0, 1200.0], wrong=7)


def test_only_the_first_row_of_a_size_names_it():
    first, second = rows([FIRST, SECOND])
    assert first.split()[:5] == ["1048576", "262144", "float32", "SUM", "lockstep"]
    assert second.split() == ["gloo", "1000.0", "840.0", "1160.0", "1.049", "1.573", "7", "10"]


def test_error_is_shown_in_the_table():
    unable = result("mpi", [], error="MPI has no AVG")
    assert rows([FIRST, unable])[1].split(maxsplit=1) == ["mpi", "error: MPI has no AVG"]
    assert rows([unable, FIRST])[1].endswith("-")


def test_json_record():
    found = record(SECOND, FIRST, "a machine", "lockstep bench all_reduce")
    assert found == {
        "backend": "gloo", "collective": "all_reduce", "size_bytes": 1 << 20, "count": 262144,
        "dtype": "float32", "op": "SUM", "nprocs": 4, "calls": 3,
        "median_us": 1000.0, "p10_us": 840.0, "p90_us": 1160.0, "algbw_gbps": 1.0486,
        "busbw_gbps": 1.5729, "wrong": 7, "ratio": 10.0, "library": "nobody 1.0",
        "machine": "a machine", "command": "lockstep bench all_reduce",
    }  # fmt: skip


def test_quantiles_lie_between_the_calls():
    five = result("a", [1.0, 2.0, 3.0, 4.0, 5.0])
    assert [five.quantile(share) for share in (0, 0.1, 0.5, 1)] == [1.0, 1.4, 3.0, 5.0]
    assert five.median == 3.0
    assert five.busbw == pytest.approx(1.5 * five.algbw)
