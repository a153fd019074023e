"""Damaged records and files beside them: every command shows what is left, or says one sentence."""

import contextlib
import json
import random

import pytest
from click.testing import CliRunner

import records
from checkpoints import draw_damage
from lockstep.cli import cli
from lockstep.kernel.errors import LockstepError
from lockstep.record.reader import read_run
from lockstep.tools.replay.recorded_program import find_base, find_obstacles, read_program
from lockstep.tools.replay.recorded_run import read_recorded_run

PROGRAM = {
    "program": {
        "kind": "script", "target": "train.py", "arguments": ["--lr", "0.1"], "cwd": "/",
        "path": ["/x"], "environ": {"A": "1"}, "launch": None, "is_redacted": False,
    },
    "sources": "sources", "torch_seed": 3, "trainer": 0, "variables": {"B": "2"},
}  # fmt: skip
COMMANDS = [
    ["report", "x"], ["runs"], ["runs", "--json"],
    ["compare", "x", "plain"], ["bisect", "x", "plain", "--json"],
    ["report", "x", "-o", "-"],
]  # fmt: skip
OTHER_FILES = [
    "launch.json",
]
BAD_TEXTS = [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff", b'{"a": ' * 100_000, b"1e999"]


def damaged_lines(draw):
    """Return the texts of a record with one damaged line, and where it is."""
    lines = draw.choice([
        records.whole(**PROGRAM), records.elastic(), records.resumed(),
        [*records.whole(**PROGRAM)[:12], records.checkpoint(5, digest="ab"),
         records.resume(7, differences=["x"]), *map(records.step, range(7, 20)), records.END],
    ])  # fmt: skip
    kind = draw.choice(sorted({line["kind"] for line in lines}))
    at = draw.choice([at for at, line in enumerate(lines) if line["kind"] == kind])
    place, text = draw_damage(lines[at], draw)
    texts = [text if number == at else json.dumps(line) for number, line in enumerate(lines)]
    return texts, (kind, place, text[:500])


def read_for_replay(folder):
    """Read what a replay and a bisection read before they start a process."""
    recorded = read_recorded_run(folder)
    assert recorded.find_sources(3) == {}
    run = read_run(folder)
    find_obstacles(run, 3, read_program(run, 3), find_base(run, 3))


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 225), marks=pytest.mark.stress)], ids=str
)
def test_a_damaged_line_of_a_record(tmp_path, monkeypatch, seeds):
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path / "runs" / "plain", records.whole())
    run = tmp_path / "runs" / "x"
    run.mkdir()
    for seed in seeds:
        draw = random.Random(seed)
        texts, place = damaged_lines(draw)
        (run / "record.jsonl").write_text("".join(f"{text}\n" for text in texts))
        for command in draw.sample(COMMANDS, 3):
            done = CliRunner().invoke(cli, command)
            assert isinstance(done.exception, (LockstepError, SystemExit, type(None))), place
        with contextlib.suppress(LockstepError):
            read_for_replay(run)


@pytest.mark.parametrize("name", OTHER_FILES)
def test_damaged_files_beside_a_record(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    records.write(tmp_path / "runs" / "plain", records.whole())
    run = records.write(tmp_path / "runs" / "x", records.whole(**PROGRAM))
    (run / name).parent.mkdir(exist_ok=True)
    for text in BAD_TEXTS:
        (run / name).write_bytes(text)
        for command in (
            *COMMANDS[:2],
            COMMANDS[5],
            ["train", "--resume", "x"],
            ["run", "--resume", "x"],
        ):
            if command[0] in ("train", "run"):
                (run / "record.jsonl").rename(run / "record")
            done = CliRunner().invoke(cli, command)
            if command[0] in ("train", "run"):
                (run / "record").rename(run / "record.jsonl")
            assert isinstance(done.exception, (LockstepError, SystemExit, type(None))), (
                text,
                command,
            )


@pytest.mark.parametrize("name", ["/", "..", "sources/../..", "\0", "/etc"])
def test_sources_outside_of_the_run_are_not_read(tmp_path, name):
    run = records.write(tmp_path / "x", records.whole(**PROGRAM | {"sources": name}))
    assert read_run(run).find_stored_sources(3) is None
    assert read_recorded_run(run).find_sources(3) == {}
