"""Reports of runs on many ranks, whose records have summaries instead of rows."""

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.record.recorder import Recorder
from lockstep.tools.report.breakdown import peak_memory, time_by_rank, time_shares
from lockstep.tools.report.rank_spread import list_slow_ranks, mean_times
from lockstep.tools.report.run_report import report_html
from lockstep.tools.report.summary import find_slowest_rank, find_slowest_step
from lockstep.tools.report.summary_text import timing_sentences


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(records.write(tmp_path_factory.mktemp("many"), records.summarized()))


def test_the_slowest_rank_and_the_slowest_step_are_named(run):
    slow = find_slowest_rank(run)
    assert (slow.rank, slow.seconds) == (700, pytest.approx(0.0079))
    assert slow.excess == pytest.approx(0.0079 / 0.007 - 1)
    step = find_slowest_step(run)
    assert (step.step, step.part, step.rank) == (150, "data", 3)
    assert timing_sentences(run)[0].startswith(
        "Rank 700 is the slowest in 99.5% of the steps: it works 7.90 ms"
    )
    first = list_slow_ranks(run)[0]
    assert (first.listed, first.first) == (1.0, 0.995)


def test_times_and_memory_are_the_mean_and_the_slowest_ranks(run):
    assert run.steps.ranks.shape == (200, 0, 4)
    assert run.steps.spread.shape == (200, 4, 4)
    assert run.steps.slowest.shape == (200, 3, 5)
    rows = time_by_rank(run)
    assert [row.name for row in rows[:3]] == ["mean", "rank 700", "rank 3"]
    assert len(rows) == 5
    assert rows[1].note == "slowest in 99.5% of the steps, among the slowest in 100.0%"
    assert sum(time_shares(run).values()) == pytest.approx(1)
    assert [(each.rank, each.num_bytes) for each in peak_memory(run)] == [(9, 4e8), (1, 3.9e8)]


def test_the_report_is_as_short_as_that_of_few_ranks(run, tmp_path):
    html = report_html(run)
    assert "Slowest ranks, per step" in html
    few = report_html(read_run(records.write(tmp_path, records.whole())))
    assert len(html) < 2 * len(few)
    assert "Slowest ranks" not in few


def test_a_record_of_few_ranks_has_no_spread(tmp_path):
    run = read_run(records.write(tmp_path, records.whole()))
    assert mean_times(run) == [] == list_slow_ranks(run)


def test_a_layout_with_rows_after_one_with_summaries_has_rows(tmp_path):
    layout = records.HEADER["layout"]
    lines = [*records.summarized(5)[:-1], records.resume(5, layout=layout), records.step(5)]
    run = read_run(records.write(tmp_path, lines))
    assert run.steps.spread.shape == (6, 4, 4)
    assert run.layout_steps.spread.shape == (1, 0, 4)
    assert run.layout_steps.slowest.shape == (1, 0, 5)
    assert [row.name for row in time_by_rank(run)] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    "summary",
    [
        {}, [], 7, {"mean": [1, 2]}, {"mean": None, "slowest": [[1]]}, {"slowest": 3},
        {"mean": ["x", None, 1e9, -1], "slowest": [["<script>x", 1, 2, 3, 4], [-5, 1, 2, 3, None]]},
    ],
)  # fmt: skip
def test_damaged_summaries_are_ignored(summary, tmp_path):
    line = records.step(0, rank_summary=summary)
    del line["ranks"]
    epoch = records.epoch(0) | {"memory_bytes": None, "memory_summary": summary}
    run = read_run(records.write(tmp_path, [records.HEADER, line, line, epoch]))
    assert "<script>x" not in report_html(run)


def test_a_recorder_rounds_a_summary(tmp_path):
    row = [1 / 3] * 4
    summary = {"ranks": 65, "min": row, "median": row, "max": row, "mean": row}
    with Recorder(tmp_path / "x") as recorder:
        recorder.write("step", step=0, rank_summary=summary | {"slowest": [[64, *row]]})
    run = read_run(tmp_path / "x")
    assert run.steps.spread.tolist() == [[[0.333333] * 4] * 4]
    assert run.steps.slowest.tolist() == [[[64, *[0.333333] * 4]]]
