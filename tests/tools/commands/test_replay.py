"""`lockstep replay`: what it prints, its exit status, and what is wrong to ask for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.checkpoint.folder import count_steps, find_checkpoints
from lockstep.cli import cli
from lockstep.kernel.errors import FileError, UsageError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 45 steps on two ranks, with checkpoints after about every 20, and after 45 steps."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["train", "digits", "-n", "2", "--epochs", "1", "--quiet", "--name", "mine"]
    words += ["--runs", str(runs), "--checkpoint-every", "20"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    return runs / "mine"


def replay(run: Path, *words: str):
    words = ("replay", run.name, "--runs", str(run.parent), *words)
    return CliRunner().invoke(cli, words, catch_exceptions=False)


def test_the_last_step_with_its_digest(run):
    result = replay(run, "--step", "44", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["equal"] is True
    assert len(found["digest"]) == 64
    assert found["digest"] == found["recorded_digest"]
    assert float.fromhex(found["loss_hex"]) == found["loss"] == found["recorded_loss"]
    assert found["norm_hex"] == found["recorded_norm_hex"]
    assert found["layout"] == {"world_size": 1, "replicas": 1, "stages": 1}
    # One that is due while the one before is being written is left out.
    saved = map(count_steps, find_checkpoints(run / "checkpoints"))
    begin = max(step for step in saved if step <= 44)
    assert found["from_step"] == begin
    words = f"replaying step 44 of mine on 1 rank, from the checkpoint after {begin} steps"
    assert words in result.stderr
    assert "step 44: the same bits" in result.stderr


def test_other_bits_than_the_recorded_ones_are_status_1(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "edited"))
    record = copy / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] == 41:
            line["norm_hex"] = (line["norm"] * (1 + 2**-52)).hex()
    record.write_text("".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))
    result = replay(copy, "--step", "41")
    assert result.exit_code == 1
    assert "step 41: different: norm: recorded " in result.stdout
    assert "replaying step 41 of edited on 1 rank" in result.stderr


def test_a_step_in_which_the_run_died_is_computed_and_not_compared(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "died"))
    record = copy / "record.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if b'"kind":"step"' in line]
    record.write_bytes(b"".join(lines[: steps[41]]))
    result = replay(copy, "--step", "41", "--json")
    assert result.exit_code == 1
    said = "step 41: computed, but not compared: the run ended in this step"
    assert said in result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["equal"], found["compared"], found["recorded_loss"]) == (False, [], None)
    assert found["loss"] > 0


def test_what_is_wrong_to_ask_for_is_one_sentence(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = [
        (["--step", "45"], UsageError, "has no such step; the last one is 44"),
        (
            ["--step", "3", "--microbatch", "8"],
            UsageError,
            "has 8 micro-batches; the last one is 7",
        ),
        (["--step", "3", "-n", "9"], UsageError, "have 8 micro-batches, and each rank needs"),
    ]
    for words, kind, said in cases:
        with pytest.raises(kind, match=said):
            replay(run, *words)
    with pytest.raises(UsageError, match="there is no run at"):
        replay(run.parent / "nothing", "--step", "1")
    empty = tmp_path / "empty"
    empty.mkdir()
    end = '{"kind": "end", "state": "done"}'
    (empty / "record.jsonl").write_text(f'{{"kind": "run", "name": "empty"}}\n{end}\n')
    with pytest.raises(UsageError, match="has no finished step"):
        replay(empty, "--step", "0")
    (empty / "record.jsonl").write_text("what is this\n")
    with pytest.raises(FileError, match="is not the record of a run"):
        replay(empty, "--step", "0")
