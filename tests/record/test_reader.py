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

from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher.run_folder import RECORD_FILE
from lockstep.record import reader
from lockstep.record.columns import TIME_CATEGORIES
from lockstep.record.reader import read_run
from lockstep.record.recorder import Recorder

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
    monkeypatch.setattr(reader, "BLOCK_STEPS", 1)  # every line a block of its own
    lines = [HEADER, step(0), step(1, metrics={"accuracy": 0.5}), step(2, metrics={"f1": 0.1}), END]
    metrics = read_run(written(tmp_path, lines)).steps.metrics
    np.testing.assert_array_equal(metrics["accuracy"], [np.nan, 0.5, np.nan])
    np.testing.assert_array_equal(metrics["f1"], [np.nan, np.nan, 0.1])


def test_varying_numbers_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_STEPS", 1)
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


def resume(number, epochs=0, **fields):
    return {"kind": "resume", "t": 3.0, "step": number, "epochs": epochs} | fields


def steps(first, last, **fields):
    return [step(number, **fields) for number in range(first, last)]


def test_a_resumption_rewinds_what_was_read(tmp_path):
    lines = [
        *(HEADER, *steps(0, 10), {"kind": "epoch", "epoch": 0, "loss": 1.0}),
        *({"kind": "checkpoint", "step": 10}, *steps(10, 20), {"kind": "epoch", "epoch": 1}),
        *({"kind": "checkpoint", "step": 14}, {"kind": "log", "step": 9, "name": "a"}),
        *({"kind": "log", "step": 10, "name": "a"}, {"kind": "warning", "message": "hot"}),
        *(END, resume(10, 1), *steps(10, 12, loss=2.0)),
    ]
    run = read_run(written(tmp_path, lines))
    assert run.steps.step.tolist() == list(range(12))
    assert run.steps.loss.tolist() == [1.0] * 10 + [2.0] * 2
    assert [line["epoch"] for line in run.epochs] == [0]
    assert [line["step"] for line in run.logged] == [9]
    assert [line["step"] for line in run.checkpoints] == [10]
    assert [line["message"] for line in run.warnings] == ["hot"]
    assert (run.end, run.state, run.remarks) == (None, "died", [])
    assert [line["step"] for line in run.resumes] == [10]


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_several_resumptions_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(reader, "BLOCK_STEPS", block)
    lines = [
        *(HEADER, *steps(0, 30), resume(20), *steps(20, 40, loss=2.0)),
        *(resume(10), *steps(10, 15, loss=3.0), resume(15), *steps(15, 18, loss=4.0), END),
    ]
    run = read_run(written(tmp_path, lines))
    assert run.steps.step.tolist() == list(range(18))
    assert run.steps.loss.tolist() == [1.0] * 10 + [3.0] * 5 + [4.0] * 3
    assert run.state == "done"
    assert [line["step"] for line in run.resumes] == [20, 10, 15]
    assert [run.segment(number) for number in (9, 10, 14, 15, 30)] == [0, 2, 2, 3, 3]


def test_a_run_that_is_resumed_from_its_beginning(tmp_path):
    run = read_run(written(tmp_path, [HEADER, *steps(0, 5), resume(0), *steps(0, 2, loss=2.0)]))
    assert run.steps.loss.tolist() == [2.0, 2.0]
    run = read_run(written(tmp_path, [HEADER, *steps(0, 5), resume(0)]))
    assert len(run.steps) == 0
    assert run.steps.ranks.shape == (0, 0, len(TIME_CATEGORIES))


def test_the_layout_is_the_last_one(tmp_path):
    wide = [[1.0] * 4] * 4
    narrow = [[1.0] * 4] * 2
    lines = [
        HEADER | {"layout": {"world_size": 4}},
        *steps(0, 10, ranks=wide),
        resume(5, layout={"world_size": 2}, environment={"hostname": "elsewhere"}),
    ]
    run = read_run(written(tmp_path, lines))
    assert run.layout == {"world_size": 2}
    assert run.environment == {"hostname": "elsewhere"}
    assert run.layout_steps.ranks.shape == (5, 4, 4), "there is no step in the new layout"
    lines += [*steps(5, 8, ranks=narrow), resume(7), *steps(7, 9, ranks=narrow)]
    run = read_run(written(tmp_path, lines))
    assert run.steps.ranks.shape == (9, 4, 4)
    assert run.layout_steps.step.tolist() == [5, 6, 7, 8]
    assert run.layout_steps.ranks.shape == (4, 2, 4)
    lines += [resume(2, layout={"world_size": 4}), *steps(2, 3, ranks=wide)]
    run = read_run(written(tmp_path, lines))
    assert run.layout_steps.step.tolist() == [0, 1, 2], "the same layout as in the beginning"


@pytest.mark.parametrize("here", [True, False])
def test_the_state_depends_on_the_host_that_wrote_last(tmp_path, here):
    hosts = ["elsewhere", os.uname().nodename]
    first, last = hosts if here else reversed(hosts)
    header = HEADER | {"environment": {"hostname": first}}
    lines = [header, step(0), resume(1, environment={"hostname": last})]
    assert read_run(written(tmp_path, lines)).state == ("died" if here else "running")


def test_a_damaged_line_rewinds_nothing(tmp_path):
    tail = "oops\n" + "".join(json.dumps(line) + "\n" for line in [*steps(6, 9), END])
    run = read_run(written(tmp_path, [HEADER, *steps(0, 5)], tail))
    assert run.steps.step.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert run.state == "done"


def test_the_line_at_which_a_resumed_run_was_killed_is_no_remark(tmp_path):
    tail = '{"kind": "step", "t": 0.5, "lo\n' + json.dumps(resume(5)) + "\n"
    for content in (tail, tail + json.dumps(step(5)) + "\noops\n"):
        run = read_run(written(tmp_path, [HEADER, *steps(0, 5)], content))
        assert len(run.remarks) == content.count("oops")


def new_round(number, at, **fields):
    return {"kind": "round", "t": at / 10, "round": number, "step": at, "world_size": 1} | fields


def test_a_round_rewinds_to_its_step_and_resumes_nothing(tmp_path):
    wide = [[1.0] * 4] * 3
    narrow = [[1.0] * 4] * 2
    lines = [
        *(HEADER | {"layout": {"world_size": 3}}, *steps(0, 5, ranks=wide)),
        *({"kind": "epoch", "t": 0.45, "epoch": 0}, *steps(5, 8, ranks=wide)),
        *({"kind": "checkpoint", "step": 6}, {"kind": "warning", "message": "hot"}),
        new_round(1, 7, lost=[{"member": 0, "signal": 9}], world_size=2, noticed=1e9),
        *steps(7, 9, loss=2.0, ranks=narrow),
        new_round(2, 9, joined=[3], world_size=3),
        *(*steps(9, 12, loss=3.0, ranks=wide), END),
    ]
    run = read_run(written(tmp_path, lines))
    assert run.steps.step.tolist() == list(range(12))
    assert run.steps.loss.tolist() == [1.0] * 7 + [2.0] * 2 + [3.0] * 3
    assert [line["round"] for line in run.rounds] == [1, 2]
    assert run.rounds[0]["lost"] == [{"member": 0, "signal": 9}]
    assert [line["epoch"] for line in run.epochs] == [0]
    assert [line["step"] for line in run.checkpoints] == [6]
    assert (run.resumes, run.state, run.remarks) == ([], "done", [])
    assert len(run.layout_steps) == 12, "the figures are those of all rounds"
    assert np.isnan(run.layout_steps.ranks[7:9, 2]).all()
    assert run.segment(11) == 0


def test_a_round_may_say_which_epochs_count(tmp_path):
    """The rank that wrote the line of an epoch died before the others had evaluated."""
    ended = {"kind": "epoch", "t": 0.45, "epoch": 0}
    lines = [HEADER, *steps(0, 5), ended, new_round(1, 5, epochs=0), ended | {"t": 0.6}]
    assert [line["t"] for line in read_run(written(tmp_path, lines)).epochs] == [0.6]


@pytest.mark.parametrize("torn", ["", '{"kind": "step", "t": 0.5, "lo'])
def test_the_line_at_which_rank_0_was_killed_is_no_remark_before_a_round(tmp_path, torn):
    """The next rank 0 goes on in the same file."""
    with Recorder(tmp_path) as recorder:
        recorder.write("run", layout={"world_size": 2})
        for number in range(4):
            recorder.write("step", step=number, epoch=0, loss=1.0)
    with (tmp_path / RECORD_FILE).open("a") as file:
        file.write(torn)
    with Recorder(tmp_path, resume=True) as recorder:
        recorder.write("run", layout={"world_size": 1})
        recorder.write("round", round=1, step=3, lost=[{"member": 0, "signal": 9}])
        for number in range(3, 6):
            recorder.write("step", step=number, epoch=0, loss=2.0)
        recorder.write("end", state="done", digest="ab")
    run = read_run(tmp_path)
    assert run.steps.loss.tolist() == [1.0] * 3 + [2.0] * 3
    assert (run.state, run.remarks) == ("done", [])
