"""How much work a new round repeats: nothing that an earlier round has lost counts twice."""

import json

import orjson
import pytest

import records
from lockstep.elastic.restart_source import RestartSource
from lockstep.launcher.run_folder import RECORD_FILE
from lockstep.training.resume.repeated_work import (
    count_repeated_steps,
    count_work,
    measure_repeated_work,
)


def new_round(noticed, continued, undone):
    return {"noticed": noticed, "continued": continued, "undone": undone}


@pytest.mark.parametrize(
    ("rounds", "seconds"),
    [
        ([], 10.0),
        ([new_round(3.0, 4.0, 0.5)], 8.5),  # continued in place, and repeated half a second
        ([new_round(8.0, 9.0, 8.0)], 1.0),  # from the same state as this one
        ([new_round(8.0, 9.0, 8.0), new_round(9.5, 9.75, 0.25)], 0.5),
        ([new_round(-5.0, -3.0, 2.0)], 10.0),  # over before the state was saved
        ([new_round(-1.0, 1.0, None)], 9.0),  # an older version did not say what it repeated
        ([new_round(9.0, 12.0, 0.0)], 9.0),  # it has come to nothing
    ],
)
def test_what_was_lost_before_does_not_count_again(rounds, seconds):
    assert count_work(0.0, 10.0, rounds) == seconds


def test_the_record_has_the_earlier_rounds_and_the_beginning(tmp_path):
    noticed = 1795245120.5  # 1795245120
    begun = "2026-11-21T07:12:00+00:00"
    lines = [
        records.HEADER | {"started": begun},
        records.step(0),
        records.new_round(1, 1, noticed=noticed, continued=noticed + 1.0, undone=0.25),
        records.step(1),
    ]
    folder = records.write(tmp_path / "run", lines)
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    (folder / RECORD_FILE).write_text(text + '{"kind":"round","noticed')
    origin = RestartSource(2, [], [2], [0], noticed + 9.0, noticed + 3.0)
    assert measure_repeated_work(origin, None, folder) == 2.25  # 0.25 s before that round, 2 after
    assert measure_repeated_work(origin, {"time": noticed + 2.5}, folder) == 0.5
    assert measure_repeated_work(origin, {}, folder) is None
    assert measure_repeated_work(origin, {"time": noticed}, None) is None
    assert measure_repeated_work(origin, None, tmp_path) is None


def test_steps_that_the_record_has_are_counted(tmp_path):
    assert count_repeated_steps(0, None) == count_repeated_steps(0, tmp_path) == 0
    lines = [records.HEADER, *map(records.step, range(5))]
    for line, steps in ((lines[-1], 3), (records.new_round(1, 3), 1), (records.step(3), 2)):
        lines.append(line)
        text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        folder = records.write(tmp_path / "run", lines)
        (folder / RECORD_FILE).write_bytes(text + orjson.dumps(records.step(9))[:-2])
        assert count_repeated_steps(2, folder) == steps
    assert count_repeated_steps(9, folder) == 0
