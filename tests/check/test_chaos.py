"""What `lockstep chaos` makes of a run: whose death cost what, and the verdict."""

import json
import os
import threading

import numpy as np
import pytest

import records
from lockstep.check.chaos import (
    Baseline,
    ChaosResult,
    Kill,
    RecordFollower,
    measure_kills,
    read_baseline,
)
from lockstep.check.kill_plan import PlannedKill
from lockstep.errors import UsageError
from lockstep.record.recorder import RECORD_FILE
from processes import until


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


def test_the_baseline_is_a_run_that_came_to_its_end(tmp_path):
    found = read_baseline(records.write(tmp_path / "whole", records.whole()))
    assert found.digest == records.END["digest"]
    assert found.intervals.tolist() == pytest.approx([0.0] + [0.01] * 19)
    assert found.seconds == 2.0
    for name, lines in {
        "going": records.whole()[:-1],
        "failed": [*records.whole()[:-1], records.END | {"state": "failed"}],
        "empty": [records.HEADER, records.END],
    }.items():
        with pytest.raises(UsageError, match="has no digest of its weights to compare with"):
            read_baseline(records.write(tmp_path / name, lines))


class Watched(RecordFollower):
    """A follower that tells when it has seen a step."""

    def __init__(self):
        super().__init__(print)
        self.seen = threading.Event()

    def _run(self):
        assert self._wait(lambda: self._steps == 3)
        self.seen.set()
        super()._run()


def test_the_record_is_followed_while_it_is_written_and_its_folder_renamed(tmp_path):
    launch, named = tmp_path / "launch", tmp_path / "named"
    launch.mkdir()
    with Watched() as follower:
        follower.begin(launch)
        os.rename(launch, named)
        os.symlink(named, launch)
        with (named / RECORD_FILE).open("a") as file:
            for line in (records.HEADER, *map(records.step, range(5)), records.new_round(1, 2)):
                text = json.dumps(line) + "\n"
                file.write(text[:20])
                file.flush()
                file.write(text[20:])
            assert not follower.seen.is_set()
            file.write(json.dumps(records.step(2)) + "\n")
            file.flush()
            until(follower.seen.is_set, "the step was not seen", 10)
        os.unlink(launch)
    assert follower.require_folder("train.py").resolve() == named


def test_a_program_without_a_record_is_named():
    with RecordFollower(print) as follower:
        pass
    with pytest.raises(UsageError, match=r"train\.py recorded no run to compare"):
        follower.require_folder("train.py")
