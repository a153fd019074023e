"""Reading records: complete, truncated, invalid, newer, of running and of died runs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import records
from lockstep.errors import FileError, UsageError
from lockstep.record import reader
from lockstep.record.reader import read_ends, read_run
from lockstep.record.recorder import RECORD_FILE, TIME_CATEGORIES, Recorder

HEADER = {
    "kind": "run",
    "version": 1,
    "name": "night",
    "environment": {"hostname": os.uname().nodename},
}
END = {"kind": "end", "t": 9.0, "state": "done", "digest": "ab"}


def step(number, **fields):
    return {"kind": "step", "t": number / 10, "step": number, "epoch": 0, "loss": 1.0} | fields


def written(folder, lines, tail=""):
    """Write a record by hand, with spaces as a person would."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / RECORD_FILE).write_text(text + tail)
    return folder


def test_written_values_are_read(tmp_path):
    rows = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]
    with Recorder(tmp_path) as recorder:
        recorder.write("run", recipe="digits", layout={"world_size": 2})
        recorder.write("step", step=0, loss=0.25, samples=32, metrics={"accuracy": 0.5}, ranks=rows)
        recorder.write("warning", rank=1, message="slow")
        recorder.write("epoch", epoch=0, loss=0.25)
        recorder.write("end", state="done", digest="ab")
    run = read_run(tmp_path)
    assert (run.name, run.state, run.remarks) == (tmp_path.name, "done", [])
    assert run.layout == {"world_size": 2}
    assert run.steps.loss.tolist() == [0.25]
    assert run.steps.metrics["accuracy"].tolist() == [0.5]
    assert run.steps.ranks.tolist() == [rows]
    assert run.warnings[0]["message"] == "slow"
    assert run.epochs[0]["epoch"] == 0
    assert run.end["digest"] == "ab"


def test_a_record_is_found_by_folder_or_file(tmp_path):
    written(tmp_path, [HEADER, END])
    assert read_run(tmp_path).header == read_run(tmp_path / RECORD_FILE).header


def test_a_truncated_last_line_is_skipped_with_a_remark(tmp_path):
    run = read_run(
        written(tmp_path, [HEADER, step(0), step(1)], tail='{"kind": "step", "t": 0.2, "lo')
    )
    assert len(run.steps) == 2
    assert run.state == "died"
    assert run.remarks == ["The last line of the record is truncated and was skipped."]


def test_a_complete_last_line_without_newline_is_read(tmp_path):
    run = read_run(written(tmp_path, [HEADER, step(0)], tail=json.dumps(END)))
    assert run.state == "done"
    assert run.remarks == []


def test_unknown_fields_and_kinds_are_ignored(tmp_path):
    lines = [HEADER | {"new": 1}, {"kind": "weather", "rain": True}, step(0, mood="good"), END]
    run = read_run(written(tmp_path, lines))
    assert len(run.steps) == 1
    assert run.remarks == []


def test_a_newer_version_is_read_with_a_remark(tmp_path):
    run = read_run(written(tmp_path, [HEADER | {"version": 99}, step(0), END]))
    assert len(run.steps) == 1
    assert "version 99" in run.remarks[0]


def test_invalid_lines_are_counted(tmp_path):
    run = read_run(
        written(tmp_path, [HEADER, step(0)], tail='oops\n[1, 2]\n{"a": 1}\n\n' + json.dumps(END))
    )
    assert run.state == "done"
    assert run.remarks == ["3 lines of the record could not be read and were skipped."]


def test_missing_and_invalid_values_are_nan(tmp_path):
    lines = [HEADER, step(0, loss=None), step(1, loss="much"), step(2, lr=0.5), {"kind": "step"}]
    steps = read_run(written(tmp_path, lines)).steps
    assert np.isnan(steps.loss).tolist() == [True, True, False, True]
    assert np.isnan(steps.lr).tolist() == [True, True, False, True]


def test_metrics_of_later_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1)  # every line a block of its own
    lines = [HEADER, step(0), step(1, metrics={"accuracy": 0.5}), step(2, metrics={"f1": 0.1}), END]
    metrics = read_run(written(tmp_path, lines)).steps.metrics
    np.testing.assert_array_equal(metrics["accuracy"], [np.nan, 0.5, np.nan])
    np.testing.assert_array_equal(metrics["f1"], [np.nan, np.nan, 0.1])


def test_varying_numbers_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_BYTES", 1)
    row = [1.0, 2.0, 3.0, 4.0]
    lines = [HEADER, step(0, ranks=[row]), step(1, ranks=[row, row]), step(2), END]
    ranks = read_run(written(tmp_path, lines)).steps.ranks
    assert ranks.shape == (3, 2, len(TIME_CATEGORIES))
    assert np.isnan(ranks[:, :, 0]).tolist() == [[False, True], [False, False], [True, True]]


def test_a_missing_record_raises_an_error(tmp_path):
    with pytest.raises(UsageError, match="there is no run at"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match="there is no run at"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\x00\xff\n", b'{"loss": 3}\n', b"[]\n"])
def test_a_file_that_is_not_a_record_raises_an_error(tmp_path, content):
    (tmp_path / RECORD_FILE).write_bytes(content)
    with pytest.raises(FileError, match="is not the record of a run"):
        read_run(tmp_path)


def test_an_empty_record_is_a_died_run(tmp_path):
    run = read_run(written(tmp_path, []))
    old = time.time() - 3600
    os.utime(tmp_path / RECORD_FILE, (old, old))
    assert len(run.steps) == 0
    assert read_run(tmp_path).state == "died"


def test_a_failed_run(tmp_path):
    assert read_run(written(tmp_path, [HEADER, END | {"state": "failed"}])).state == "failed"


LIVES = """
    import os, sys
    from lockstep.record.recorder import Recorder

    recorder = Recorder(sys.argv[1])
    recorder.write("run", environment={"hostname": os.uname().nodename})
    recorder.write("step", step=0, loss=1.0)
    print("written", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_running_while_its_process_lives_and_died_when_killed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LIVES), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"written\n"
        assert read_run(tmp_path).state == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert read_run(tmp_path).state == "died"


@pytest.mark.parametrize(("age", "state"), [(1, "running"), (3600, "died")])
def test_the_state_on_another_host_depends_on_the_age_of_the_record(tmp_path, age, state):
    header = HEADER | {"environment": {"hostname": "elsewhere"}}
    written(tmp_path, [header, step(0)])
    then = time.time() - age
    os.utime(tmp_path / RECORD_FILE, (then, then))
    assert read_run(tmp_path).state == state


def test_only_the_ends_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "TAIL_BYTES", 3000)
    lines = [records.HEADER, *map(records.step, range(500)), records.epoch(49), records.END]
    place = records.write(tmp_path, lines)
    run = read_ends(place)
    assert run.header == records.HEADER
    assert run.end == records.END
    assert 5 < len(run.steps) < 20
    assert run.steps.step[-1] == 499
    assert run.remarks == []


def test_a_short_record_is_read_completely(tmp_path):
    place = records.write(tmp_path, records.whole())
    assert len(read_ends(place).steps) == 20
    (place / RECORD_FILE).write_text("")
    assert len(read_ends(place).steps) == 0
