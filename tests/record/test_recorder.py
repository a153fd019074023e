"""The recorder: lines, and errors of the file system."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import FileError, UsageError
from lockstep.record import recorder as recorder_module
from lockstep.record.environment import describe_environment
from lockstep.record.reader import read_run
from lockstep.record.recorder import RECORD_FILE, RECORD_VERSION, Recorder, create_run_folder


def lines_of(folder):
    return [json.loads(line) for line in (folder / RECORD_FILE).read_bytes().splitlines()]


def test_the_first_line_has_version_and_name(tmp_path):
    with Recorder(tmp_path / "night") as recorder:
        recorder.write("run", recipe="digits")
    (line,) = lines_of(tmp_path / "night")
    assert line["kind"] == "run"
    assert line["version"] == RECORD_VERSION
    assert line["name"] == "night"
    assert line["recipe"] == "digits"
    assert line["started"].endswith("+00:00")


def test_times_ascend(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(50):
            recorder.write("step", step=step)
    times = [line["t"] for line in lines_of(tmp_path)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_line_can_be_read_before_the_run_ends(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.write("step", step=0, loss=1.5)
        assert lines_of(tmp_path)[0]["loss"] == 1.5


def test_losses_are_read_bit_identically(tmp_path):
    losses = np.random.default_rng(1).normal(size=200).tolist()
    with Recorder(tmp_path) as recorder:
        for loss in losses:
            recorder.write("step", loss=loss)
    assert read_run(tmp_path).steps.loss.tolist() == losses


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor(2.5), 2.5),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (float("nan"), None),
        (float("inf"), None),
        (torch.float32, "torch.float32"),
        ({3: "a"}, {"3": "a"}),
        ({2}, [2]),
    ],
)
def test_values_without_a_json_type(tmp_path, value, written):
    with Recorder(tmp_path) as recorder:
        recorder.write("step", value=value)
    assert lines_of(tmp_path)[0]["value"] == written


def test_a_number_beyond_64_bits_is_written_as_text(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.write("run", options={"seed": 2**70, "lr": 0.1}, recipe="digits")
    (line,) = lines_of(tmp_path)
    assert str(2**70) in line["options"]
    assert line["recipe"] == "digits"


def test_an_existing_record_is_not_overwritten(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.write("step", step=7)
    before = (tmp_path / RECORD_FILE).read_bytes()
    with pytest.raises(UsageError, match="already holds the record of a run"):
        Recorder(tmp_path)
    assert (tmp_path / RECORD_FILE).read_bytes() == before


def test_a_file_instead_of_the_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(FileError, match="runs"):
        Recorder(tmp_path / "runs" / "a")
    with pytest.raises(FileError, match="is not a folder"):
        Recorder(tmp_path / "runs")
    with pytest.raises(FileError, match="is not a folder"):
        create_run_folder(tmp_path / "runs", "digits")


def test_a_folder_that_cannot_be_created():
    with pytest.raises(FileError, match=r"/proc/runs.* cannot be created"):
        Recorder(Path("/proc/runs/a"))  # refuses even root
    with pytest.raises(FileError, match="cannot be created"):
        create_run_folder(Path("/proc/runs"), "digits")


DISK_FILLS = """
    import os, resource, sys
    from lockstep.record.recorder import Recorder

    recorder = Recorder(sys.argv[1])
    recorder.write("run", environment={"hostname": os.uname().nodename})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for step in range(100):
        recorder.write("step", step=step, loss=0.5)
    recorder.close()
    print(recorder.failure)
"""


def test_a_full_disk_prints_one_message_and_does_not_raise(tmp_path):
    """A limit on the file's size gives the write the same partial success as a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISK_FILLS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert os.path.getsize(tmp_path / RECORD_FILE) == 1000, "the limit was not reached"
    assert done.stderr.count("cannot be written any more") == 1
    assert done.stderr.strip() == f"lockstep: {done.stdout.strip()}"
    run = read_run(tmp_path)
    assert run.state == "died"
    assert 10 < len(run.steps) < 100
    assert run.remarks == ["The last line of the record is truncated and was skipped."]


def test_a_partial_write_is_continued(tmp_path, monkeypatch):
    whole = os.write
    monkeypatch.setattr(recorder_module.os, "write", lambda place, data: whole(place, data[:7]))
    with Recorder(tmp_path) as recorder:
        recorder.write("step", step=7, loss=0.5)
    assert lines_of(tmp_path)[0]["loss"] == 0.5


def test_writing_after_closing_does_nothing(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.close()
    recorder.close()
    recorder.write("step", step=1)
    assert recorder.failure is None
    assert lines_of(tmp_path) == []


def test_run_folders_of_one_minute_have_different_names(tmp_path):
    names = [create_run_folder(tmp_path / "runs", "digits") for _ in range(4)]
    assert len(set(names)) == 4
    assert all(name.startswith("digits-20") for name in names)
    Recorder(tmp_path / "runs" / names[0]).close()


def test_the_environment_is_recorded(tmp_path):
    found = describe_environment()
    with Recorder(tmp_path) as recorder:
        recorder.write("run", environment=found)
    assert lines_of(tmp_path)[0]["environment"] == found
    assert found["torch"] == torch.__version__
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["processor"]
