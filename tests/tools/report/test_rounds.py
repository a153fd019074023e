"""The rounds of an elastic run."""

import pytest

import records
from lockstep.record.reader import read_run
from lockstep.tools.report.run_report import report_html
from lockstep.tools.report.summary import summarize_run
from lockstep.tools.report.summary_text import round_sentence


@pytest.fixture
def run(tmp_path):
    return read_run(records.write(tmp_path, records.elastic()))


def test_deaths_and_newcomers_are_told(run):
    assert round_sentence(run) == "5 rounds: 2 ranks died (SIGKILL), 2 joined."


DAMAGED = [
    {"lost": "all", "joined": 3, "left": None, "t": None},
    {"lost": [3, {"member": "x"}, {"member": 2**70, "signal": "y"}], "joined": [True, "a", 2**80]},
    {"round": "first", "step": None, "world_size": [], "noticed": "now", "undone": {}},
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_lines_are_told_as_far_as_they_can_be(tmp_path, damage):
    lines = [records.HEADER, records.step(0), records.new_round(1, 1) | damage, records.END]
    run = read_run(records.write(tmp_path, lines))
    assert "2 rounds: " in report_html(run)


def test_the_duration_of_an_elastic_run_is_that_of_all_its_processes(run):
    assert summarize_run(run).seconds == records.END["t"], "not that of the last rank 0's process"
