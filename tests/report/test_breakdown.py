"""Breakdowns of a run: waiting between ranks."""

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.report.breakdown import wait_matrix


def test_recorded_waiting_is_added_up_by_its_source(tmp_path):
    lines = [records.timeline(n, pairs=2) for n in range(3)]
    found = wait_matrix(read_run(records.write(tmp_path, [records.HEADER, *lines])))
    assert found.steps == 3
    assert found.seconds[0, 1] == pytest.approx(5e-3)
    assert found.seconds[3, 2] == pytest.approx(2.5e-3)
    assert found.seconds.sum() == pytest.approx(15e-3)
    assert found.num_bytes[1, 0] == 4000
    names, rows = found.names, found.rows
    assert (names[:2], names[-1]) == (["rank", "for rank 0"], "received")
    assert rows[0] == ["0", "", "5.00 ms, 2.00 kB", "", "", "2.00 kB"]


def test_replicas_wait_for_the_slowest(tmp_path):
    rows = [[0.006, 0, 0.003, 0], [0.007, 0, 0.001, 0.001], [0.009, 0, 0, 0]]
    run = read_run(records.write(tmp_path, [records.HEADER, records.step(0, ranks=rows)]))
    assert wait_matrix(run).seconds.tolist() == [[0, 0, 0.003], [0, 0, 0.001], [0, 0, 0]]


def test_a_single_rank_or_a_run_without_times_has_no_matrix(tmp_path):
    alone = [records.step(0, ranks=[[0.006, 0, 0, 0]])]
    assert wait_matrix(read_run(records.write(tmp_path / "a", [records.HEADER, *alone]))) is None
    assert wait_matrix(read_run(records.write(tmp_path / "b", [records.HEADER]))) is None


def test_only_the_first_of_many_ranks_are_listed(tmp_path):
    rows = [[0.006, 0, 0.003 * (rank != 1), 0] for rank in range(40)]
    rows[1][0] = 0.009
    run = read_run(records.write(tmp_path, [records.HEADER, records.step(0, ranks=rows)]))
    names, cells = wait_matrix(run).names, wait_matrix(run).rows
    assert (len(names), len(cells)) == (17, 16)
