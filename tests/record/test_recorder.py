"""The recorder: lines, and errors of the file system."""

import fcntl
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher import world
from lockstep.launcher.launch import launch_in_this_process
from lockstep.launcher.run_folder import RECORD_FILE, RECORD_VERSION
from lockstep.record import recorder as recorder_module
from lockstep.record.reader import read_run
from lockstep.record.recorder import Recorder
from lockstep.record.run_environment import describe_environment


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


def test_only_variables_that_a_user_set_are_recorded(monkeypatch):
    monkeypatch.setattr(world, "_variables_set", ["GLOO_SOCKET_IFNAME"])
    given = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}
    given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = describe_environment()["variables"]
    assert {name: found[name] for name in given if name in found} == {"NCCL_DEBUG": "INFO"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert describe_environment()["variables"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("resume", [False, True])
def test_a_replay_writes_no_record(tmp_path, resume):
    with Recorder(tmp_path / "run") as recorder:
        recorder.write("step", step=0)
        before = recorder.path.read_bytes()
        with launch_in_this_process(), Recorder(tmp_path / "run", resume=resume) as another:
            for kind in ("run", "resume", "step", "checkpoint", "end"):
                another.write(kind, step=1)
        recorder.write("step", step=1)  # its lock and its file are not touched
    assert recorder.path.read_bytes().startswith(before)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [0, 1]
    with launch_in_this_process():
        Recorder(tmp_path / "new").write("run")
    assert not (tmp_path / "new").exists()


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


def resumed(folder):
    """Continue a record with a line "resume" and one step; return all lines."""
    with Recorder(folder, {"options": {"lr": 0.5}}, resume=True) as recorder:
        recorder.write("run", recipe="digits")
        recorder.write("resume", step=1, epochs=0)
        recorder.write("step", step=1, loss=0.25)
    return lines_of(folder)


def test_a_record_is_continued(tmp_path):
    with Recorder(tmp_path) as recorder:
        assert not recorder.is_continued
        recorder.write("run", recipe="digits")
        recorder.write("step", step=0)
        before = (tmp_path / RECORD_FILE).read_bytes()
    lines = resumed(tmp_path)
    assert (tmp_path / RECORD_FILE).read_bytes().startswith(before)
    assert [line["kind"] for line in lines] == ["run", "step", "resume", "step"]
    assert lines[2]["options"] == {"lr": 0.5}
    assert lines[2]["resumed"].endswith("+00:00")


def test_the_time_goes_on_from_the_last_line(tmp_path):
    last = {"kind": "step", "t": 5000.5, "step": 0}
    (tmp_path / RECORD_FILE).write_text(f'{{"kind": "run"}}\n{json.dumps(last)}\n')
    times = [line["t"] for line in resumed(tmp_path)[1:]]
    assert times == sorted(times)
    assert 5000.5 < times[1] < 5100


@pytest.mark.parametrize("tail", ['{"kind": "st', '{"kind": "weather"}', '{"t": ', ""])
def test_a_truncated_last_line_is_ended_before_the_record_is_continued(tmp_path, tail):
    first = json.dumps({"kind": "run", "name": "night"}) + "\n"
    (tmp_path / RECORD_FILE).write_text(first + tail)
    with Recorder(tmp_path, resume=True) as recorder:
        assert recorder.is_continued
        recorder.write("resume", step=0, epochs=0)
    lines = (tmp_path / RECORD_FILE).read_text().splitlines()
    assert lines[:-1] == [first.strip(), *([tail] if tail else [])]
    assert json.loads(lines[-1])["kind"] == "resume"
    assert read_run(tmp_path).remarks == []


def test_the_time_is_found_before_a_last_line_that_is_longer_than_the_tail(tmp_path):
    long = {"kind": "warning", "t": 7.0, "message": "x" * 3 * recorder_module.TAIL_BYTES}
    (tmp_path / RECORD_FILE).write_text(json.dumps(long) + "\n")
    with Recorder(tmp_path, resume=True) as recorder:
        recorder.write("resume", step=0)
    assert 7.0 < lines_of(tmp_path)[-1]["t"] < 100


@pytest.mark.parametrize("content", [None, "", '{"kind": "run", "na'])
def test_a_folder_without_a_first_line_begins_a_record(tmp_path, content):
    if content is not None:
        (tmp_path / RECORD_FILE).write_text(content)
    with Recorder(tmp_path, resume=True) as recorder:
        assert not recorder.is_continued
        recorder.write("run", recipe="digits")
    assert [line["kind"] for line in lines_of(tmp_path)] == ["run"]


def test_a_run_that_is_resumed_continues_its_record_by_default(tmp_path, monkeypatch):
    Recorder(tmp_path).close()
    (tmp_path / RECORD_FILE).write_text('{"kind": "run"}\n')
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with Recorder(tmp_path) as recorder:
        assert recorder.is_continued
    with pytest.raises(UsageError, match="already holds the record"):
        Recorder(tmp_path, resume=False)
    monkeypatch.setenv("LOCKSTEP_RESUME", "")
    with pytest.raises(UsageError, match="already holds the record"):
        Recorder(tmp_path)


def test_a_record_that_another_process_writes_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "LOCK_SECONDS", 0.1)
    with Recorder(tmp_path) as other:
        other.write("run", recipe="digits")
    before = (tmp_path / RECORD_FILE).read_bytes()
    with (tmp_path / RECORD_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=rf"{tmp_path} cannot be resumed: another process"):
            Recorder(tmp_path, resume=True)
    assert (tmp_path / RECORD_FILE).read_bytes() == before
    with Recorder(tmp_path, resume=True), (tmp_path / RECORD_FILE).open("rb") as file:
        with pytest.raises(BlockingIOError):  # the lock is held again
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with Recorder(tmp_path, resume=True) as later:  # one of this process gives way
            later.write("step", step=0)


def test_a_reader_does_not_keep_a_record_from_being_continued(tmp_path, monkeypatch):
    """It looks at the lock by taking it for a moment."""
    (tmp_path / RECORD_FILE).write_text('{"kind": "run"}\n')
    with (tmp_path / RECORD_FILE).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        pauses = []

        def pause(seconds):
            pauses.append(seconds)
            fcntl.flock(reader, fcntl.LOCK_UN)

        monkeypatch.setattr(recorder_module.time, "sleep", pause)
        with Recorder(tmp_path, resume=True) as recorder:
            assert recorder.is_continued
    assert len(pauses) == 1


def test_a_record_that_cannot_be_continued(tmp_path):
    (tmp_path / RECORD_FILE).mkdir()
    with pytest.raises(FileError, match=r"record\.jsonl cannot be continued"):
        Recorder(tmp_path, resume=True)


def test_a_file_instead_of_the_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(FileError, match="runs"):
        Recorder(tmp_path / "runs" / "a")
    with pytest.raises(FileError, match="is not a folder"):
        Recorder(tmp_path / "runs")


def test_a_folder_that_cannot_be_created():
    with pytest.raises(FileError, match=r"/proc/runs.* cannot be created"):
        Recorder(Path("/proc/runs/a"))  # refuses even root


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
    assert 5 < len(run.steps) < 100
    last = (tmp_path / RECORD_FILE).read_bytes().splitlines()[-1]
    truncated = "The last line of the record is truncated and was skipped."
    assert run.remarks == ([] if last.endswith(b"}") else [truncated])  # the limit may be its end


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


def test_the_environment_is_recorded(tmp_path):
    found = describe_environment()
    with Recorder(tmp_path) as recorder:
        recorder.write("run", environment=found)
    assert lines_of(tmp_path)[0]["environment"] == found
    assert found["torch"] == torch.__version__
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["processor"]
