"""The program of a recorded run: what can run again, and what cannot be reproduced here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints import complete
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.kernel.errors import UsageError
from lockstep.portable.variables import OF_TORCH
from lockstep.record.reader import read_run
from lockstep.record.run_environment import describe_environment
from lockstep.tools.replay.recorded_program import Base, find_base, find_obstacles, read_program

SCRIPT = {
    "kind": "script",
    "target": "train.py",
    "arguments": ["--lr", "0.1"],
    "cwd": "/",
    "path": ["/home/ann"],
    "environ": {"PYTHONHASHSEED": "3"},
}


def write(folder: Path, program: dict[str, object] | None = None, *more, **fields):
    """Write a record, and return its run."""
    header = {"kind": "run", "version": 1, "name": "mine", **fields}
    lines = [header if program is None else {**header, "program": program}, *more]
    (folder / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_run(folder)


def test_the_program_is_what_the_record_says(tmp_path):
    run = write(tmp_path, SCRIPT, trainer=1, sources="sources", layout={"threads": 4})
    (tmp_path / "sources").mkdir()
    program = read_program(run, 0)
    assert (program.kind, program.target, program.arguments) == (
        "script",
        "train.py",
        ("--lr", "0.1"),
    )
    assert (program.cwd, program.path, program.trainer) == ("/", ("/home/ann",), 1)
    expected = {"PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "4"}
    assert program.environ == expected | {"LOCKSTEP_PORTABLE": "0"}
    portable = write(tmp_path, SCRIPT, layout={"threads": 4}, environment={"portable": True})
    expected |= OF_TORCH
    assert read_program(portable, 0).environ == expected
    assert program.sources == tmp_path / "sources"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ({"kind": "notebook", "target": ""}, "by a notebook, whose cells are not stored"),
        ({"kind": "function", "target": "/x/ipykernel_launcher.py"}, "by a notebook"),
        ({"kind": "driver", "target": ""}, "by the workers of a driver, whose calls are not"),
        ({"kind": "command", "target": ""}, "by `python -c` or an interactive interpreter"),
        ({"kind": "dream", "target": ""}, "by a dream, which this version of lockstep cannot run"),
        ({**SCRIPT, "arguments": ["--token", "[redacted]"]}, "contained a secret"),
    ],
)
def test_what_cannot_run_again_is_one_sentence(tmp_path, program, said):
    with pytest.raises(UsageError, match=said):
        read_program(write(tmp_path, program), 0)


def test_a_record_without_a_program_or_sources(tmp_path):
    with pytest.raises(UsageError, match="does not say which program it ran"):
        read_program(write(tmp_path), 0)
    run = write(tmp_path, SCRIPT)
    assert "the sources of the run are not stored: today's files are run" in find_obstacles(
        run, 0, read_program(run, 0), Base()
    )


def test_what_differs_here_is_said_before(tmp_path):
    here = describe_environment() | {"portable": False}
    (tmp_path / "sources").mkdir()
    run = write(tmp_path, SCRIPT, environment=here, sources="sources")
    program = read_program(run, 0)
    assert find_obstacles(run, 0, program, Base(remarks=("damaged",))) == ["damaged"]
    away = replace(program, cwd="/nowhere")
    assert find_obstacles(run, 0, away, Base())[0].startswith("the working directory /nowhere is n")
    other = {**here, "torch": "1.0", "instructions": "NEON", "hostname": "elsewhere"}
    run = write(tmp_path, SCRIPT, environment=other, sources="sources")
    said = find_obstacles(run, 0, program, Base())
    assert said == [
        f"torch is {here['torch']}, it was 1.0: the bits may differ",
        f"instructions is {here['instructions']}, it was NEON: the bits may differ",
    ]


def test_a_checkpoint_elsewhere_counts_only_where_the_record_names_it(tmp_path):
    other = tmp_path / "other" / "checkpoints"
    for steps in (4, 8):
        writer = CheckpointWriter(other, keep=9)
        writer.save(complete(steps), steps, 0)
        writer.wait()
    resume = {"kind": "resume", "step": 4, "epochs": 0, "checkpoint": str(other / "step-4")}
    folder = tmp_path / "mine"
    folder.mkdir()
    run = write(folder, SCRIPT, resume)
    assert find_base(run, 9) == Base(4, other / "step-4")
    assert find_base(run, 3) == Base()
