"""What `lockstep chaos` makes of a run: whose death cost what, and the verdict."""

import json

import numpy as np
import pytest

import records
from lockstep.tools.check.chaos_result import Baseline, ChaosResult, Kill, measure_kills
from lockstep.tools.check.kill_plan import PlannedKill


def kill(member, time, **fields):
    return Kill(PlannedKill(6, 0.5, 1), member, 1, 6, time, **fields)


def result(tmp_path, **fields):
    baseline = Baseline(tmp_path / "a", "ab", np.ones(20), 2.0)
    values = {
        "baseline": baseline, "folder": tmp_path / "b", "digest": "ab", "planned": 1,
        "kills": [kill(1, 5.0)], "rounds": 2, "seconds": 3.0, "seed": 7,
    }  # fmt: skip
    return ChaosResult(**values | fields)


def test_the_cost_of_a_kill_is_read_from_the_round_that_began_without_the_member():
    rounds = [
        records.new_round(1, 6, lost=[{"member": 1, "signal": 9}], continued=5.25, undone=0.125),
        records.new_round(2, 9, joined=[2]),
        records.new_round(3, 9, lost=[{"member": 0, "signal": 9}, {"member": 2, "signal": 9}]),
    ]
    late = records.END["t"] + 1e12
    first, second, third = measure_kills([kill(1, 5.0), kill(2, 6.0), kill(3, late)], rounds)
    assert (first.round, first.seconds_to_repeat, first.repeated_seconds) == (1, 0.25, 0.125)
    assert first.seconds_lost == 0.375
    assert second.round == 3
    assert (third.round, third.seconds_lost) == (None, None)


def test_a_round_that_nobody_recorded_is_one_pause_with_the_next_one():
    rounds = [
        records.new_round(1, 6, lost=[{"member": 1, "signal": 9}], noticed=5.0, continued=5.25),
        records.new_round(3, 6, lost=[{"member": 7, "signal": 9}], noticed=7.0, continued=9.0),
    ]
    (found,) = measure_kills([kill(2, 6.0)], rounds)
    assert (found.round, found.seconds_to_repeat) == (3, 3.0)


def test_the_result_says_everything_as_plain_values(tmp_path):
    measured = kill(1, 5.0, round=1, seconds_to_repeat=0.25, repeated_seconds=0.125)
    found = result(tmp_path, kills=[measured, kill(2, 6.0)], planned=2).plain()
    json.dumps(found)
    assert found["kills"] == found["planned"] == 2
    assert (found["digest"], found["baseline_digest"], found["equal"]) == ("ab", "ab", True)
    assert found["median_seconds_lost"] == found["max_seconds_lost"] == 0.375
    assert (found["seconds"], found["baseline_seconds"], found["rounds"]) == (3.0, 2.0, 2)
    assert found["deaths"][0]["member"] == 1
    assert found["deaths"][0]["part"] == 0.5
    assert found["deaths"][1]["seconds_lost"] is None


@pytest.mark.parametrize(
    "fields",
    [{"digest": "cd"}, {"digest": None}, {"planned": 2}, {"failure": "rank 0 failed: oops"}],
)
def test_a_run_passes_only_with_all_kills_and_the_same_bits(tmp_path, fields):
    assert result(tmp_path).is_passed
    assert not result(tmp_path, **fields).is_passed
