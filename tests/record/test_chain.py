"""The chain of a record: every change of its lines is seen, and no valid record is accused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import records
from lockstep.launcher.run_folder import describe_launch, write_description
from lockstep.record.chain import ChainCheck, add_link, find_last_link
from lockstep.record.reader import read_ends, read_run
from lockstep.record.recorder import RECORD_FILE, Recorder

CHANGED = "was changed after it was written: line {}"
MISSING = "Lines are missing at the end of the record"


def record(folder, steps=range(6), *, end=True, **options):
    """Record some steps; return the path of the record."""
    with Recorder(folder, **options) as recorder:
        recorder.write("run", seed=1)
        for step in steps:
            recorder.write("step", step=step, loss=0.5, epoch=0)
        if end:
            recorder.write("end", state="done")
    return folder / RECORD_FILE


def breaks(lines):
    check = ChainCheck()
    check.check(lines)
    return check.breaks


NUMBERS = st.integers(-(2**40), 2**40)
LINES = st.lists(st.dictionaries(st.text(max_size=4), NUMBERS, min_size=1), min_size=3)


@given(LINES, st.data())
def test_every_change_breaks_the_chain_at_its_place(objects, data):
    lines, link = [], 0
    for each in objects:
        line, link = add_link(orjson.dumps(each), link)
        assert {**orjson.loads(line), "chain": 0} == {**each, "chain": 0}
        lines.append(line)
    assert breaks(lines) == []
    assert breaks([*lines[:-1], lines[-1][:-1]]) == [], "the last line has no newline yet"
    assert find_last_link(lines) == find_last_link([b"\n", *lines[:-1], lines[-1][:-1]]) == link
    at = data.draw(st.integers(0, len(lines) - 2))
    assert breaks(lines[:at] + lines[at + 1 :])[0] == at + 1, "a line was removed"
    edited = lines[at].replace(b":", b": ", 1)
    assert breaks([*lines[:at], edited, *lines[at + 1 :]]) == [at + 1]
    unlinked = orjson.dumps(objects[at]) + b"\n"
    assert at == 0 or breaks([*lines[:at], unlinked, *lines[at + 1 :]])[0] == at + 1
    assert breaks([*lines[:at], lines[at], *lines[at:]]) == [at + 2], "a line was repeated"
    if lines[at] != lines[at + 1]:
        swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        assert breaks(swapped)[0] == at + 1


def test_changes_of_a_record_are_said(tmp_path):
    path = record(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert read_run(tmp_path).remarks == []
    changed = {
        4: [*lines[:3], lines[3].replace(b"0.5", b"0.4"), *lines[4:]],
        3: [*lines[:2], *lines[3:]],
        1: lines[1:],
        5: [*lines[:4], orjson.dumps(records.step(3)) + b"\n", *lines[4:]],
    }
    for number, text in changed.items():
        path.write_bytes(b"".join(text))
        (remark,) = (each for each in read_run(tmp_path).remarks if "changed" in each)
        assert CHANGED.format(number) in remark
    path.write_bytes(b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]))
    assert "line 3 does" in (remark := read_run(tmp_path).remarks[0])
    assert "and 2 later lines likewise" in remark
    assert read_ends(tmp_path).remarks == [], "which does not read all lines"


def test_resumed_and_killed_records_are_valid(tmp_path):
    path = record(tmp_path, end=False)
    for number in range(3):
        with path.open("ab") as file:
            file.write(b'{"kind":"step","t":0.3,"st')  # killed while it wrote a line
        with Recorder(tmp_path, resume=True) as recorder:
            recorder.write("resume", step=4, epochs=0)
            recorder.write("step", step=4, loss=0.1 * number, text="\u2028 \n")
            recorder.write("odd", value=1 << 70)  # JSON of another library
    assert read_run(tmp_path).remarks == []
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2] + lines[-1:]))
    assert any("changed" in each for each in read_run(tmp_path).remarks)


def test_a_process_that_is_killed_leaves_a_valid_record(tmp_path):
    program = f"""
    import os
    from pathlib import Path
    from lockstep.record.recorder import Recorder
    recorder = Recorder(Path({str(tmp_path)!r}))
    recorder.write("run")
    print(flush=True)
    for step in range(10**9):
        recorder.write("step", step=step)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(run, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    with Recorder(tmp_path, resume=True) as recorder:
        recorder.write("resume", step=0, epochs=0)
    assert not any("changed" in each for each in read_run(tmp_path).remarks)


def test_a_record_of_an_older_version_is_read_and_continued(tmp_path):
    records.write(tmp_path, [records.HEADER, *map(records.step, range(3))])
    assert read_run(tmp_path).remarks == []
    with Recorder(tmp_path, resume=True) as recorder:
        recorder.write("resume", step=2, epochs=0)
        recorder.write("step", step=2)
    assert read_run(tmp_path).remarks == []
    path = tmp_path / RECORD_FILE
    path.write_text(path.read_text().replace('"epochs":0', '"epochs":1'))
    assert CHANGED.format(5) in read_run(tmp_path).remarks[0]


def test_a_missing_end_is_seen_by_a_later_checkpoint(tmp_path):
    path = record(tmp_path)
    for name in ("step-4", "step-6-2", "step-9.older", ".step-9.1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert read_run(tmp_path).remarks == []
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert read_run(tmp_path).remarks == []
    path.write_bytes(b"".join(lines[:-2]))
    os.utime(path, (1, 1))
    assert read_run(tmp_path).remarks == [
        f"{MISSING}: it has 5 steps, and the run a checkpoint after step 6."
    ]


@pytest.mark.parametrize("exit_status", [0, 1, None])
def test_a_missing_end_is_seen_by_the_exit_status(tmp_path, exit_status):
    path = record(tmp_path)
    described = replace(describe_launch("script", "train.py", [], 1, 1), exit_status=exit_status)
    write_description(tmp_path, described)
    assert read_run(tmp_path).remarks == []
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    os.utime(path, (1, 1))
    found = [MISSING in each for each in read_run(tmp_path).remarks]
    assert found == ([True] if exit_status == 0 else [])


def test_every_line_of_a_record_is_json_with_its_link(tmp_path):
    lines = [json.loads(line) for line in record(tmp_path).read_text().splitlines()]
    assert len({line["chain"] for line in lines}) == len(lines) == 8
    assert "chain" not in read_run(tmp_path).header
