"""Results: the table and the JSON records."""

from __future__ import annotations

import pytest

from lockstep.tools.bench.results import COLUMNS, Measurement, list_errors, record, rows


def result(name, times, **more):
    return Measurement(name, "nobody 1.0", "all_reduce", 4, 1 << 20, 262144, times, **more)


FIRST = result("lockstep", [100.0] * 9)
SECOND = result("gloo", [800.0, 1000.0, 1200.0], wrong=7)


def test_only_the_first_row_of_a_size_names_it():
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in rows([FIRST, SECOND]))
    named = [first[column] for column in ("size (B)", "count", "type", "redop", "backend")]
    assert named == ["1048576", "262144", "float32", "SUM", "lockstep"]
    assert second == {
        "size (B)": "", "backend": "gloo", "median (us)": "1000.0", "p10 (us)": "840.0",
        "p90 (us)": "1160.0", "busbw (GB/s)": "1.573", "ratio": "10", "wrong": "7",
        "algbw (GB/s)": "1.049", "count": "", "type": "", "redop": "",
    }  # fmt: skip


def test_what_could_not_be_measured_has_no_numbers_and_a_sentence():
    unable = result("mpi", [], error="MPI has no AVG")
    assert set(rows([FIRST, unable])[1]) == {"mpi", "-", ""}
    assert rows([unable, FIRST])[1][COLUMNS.index("ratio")] == "-"
    assert list_errors([FIRST, unable]) == [
        "mpi could not be measured with 1048576 bytes: MPI has no AVG"
    ]


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
