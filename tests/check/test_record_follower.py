"""The record of a run is followed while another thread launches it."""

import json
import os
import threading

import pytest

import records
from lockstep.kernel.errors import UsageError
from lockstep.record.format import RECORD_FILE
from lockstep.tools.check.record_follower import RecordFollower
from processes import until


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
