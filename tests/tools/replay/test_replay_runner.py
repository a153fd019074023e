"""Recorded steps that are computed again, in other layouts, have the same bits."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.checksum import checksum
from lockstep.cli import cli
from lockstep.kernel.errors import RankError
from lockstep.record.fingerprints import RecordedStep, read_step_fingerprints
from lockstep.tools.check import session_launch
from lockstep.tools.replay import replay_runner
from lockstep.tools.replay.recorded_program import Base, Program
from lockstep.tools.replay.result import Replay, ReplayRequest
from replays import run_replay


def recorded(run: Path, first: int, last: int) -> list[RecordedStep]:
    return read_step_fingerprints(run)[first : last + 1]


def results(replay: Replay) -> list[RecordedStep]:
    assert not replay.failure, replay.details
    return [
        RecordedStep(each.step, each.epoch, each.loss, each.norm, each.losses, each.batch)
        for each in replay.steps
    ]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages on four ranks, with checkpoints after 10 and 20 steps."""
    runs = tmp_path_factory.mktemp("runs")
    words = ["train", "digits", "-n", "4", "--stages", "2", "--epochs", "1", "--quiet", "--name"]
    words += ["mine", "--runs", str(runs), "--checkpoint-every", "10"]
    words += ["--batch-size", "64"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    return runs / "mine"


def test_a_step_of_a_recipe_on_2_x_2_ranks_is_replayed_by_one_and_by_two(recipe):
    alone = run_replay(ReplayRequest(recipe, 21, 22))
    assert 20 <= alone.base <= 21
    assert results(alone) == recorded(recipe, 21, 22)
    both = run_replay(ReplayRequest(recipe, 21, 22, 2))
    assert both.steps == alone.steps
    assert list(alone.steps[0].digest) != list(alone.steps[1].digest)


def test_steps_before_the_first_checkpoint_are_replayed_from_the_beginning(recipe):
    replay = run_replay(ReplayRequest(recipe, 3, 5))
    assert replay.base == 0
    assert results(replay) == recorded(recipe, 3, 5)


def test_operators_are_recorded_without_a_change_of_bits(recipe):
    alone = run_replay(ReplayRequest(recipe, 21, 21, level="operators", kept=3))
    assert results(alone) == recorded(recipe, 21, 21)
    ours = alone.steps[0].operators
    assert [each.phase for each in ours[:8]] == ["data"] * 8
    phases = {each.phase for each in ours}
    assert phases == {"data", "forward", "backward", "reduction", "optimizer"}
    assert {each.microbatch for each in ours if each.phase == "backward"} == {*range(8)}
    kept = alone.steps[0].kept
    assert kept is not None
    assert tuple(map(checksum, kept.outputs)) == ours[3].outputs


def test_sigterm_leaves_no_files_behind(tmp_path, monkeypatch):
    def interrupted(*order, **options) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(session_launch, "launch", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as raised:
            replay_runner.run_program(
                Program("script", "train.py"), Base(), ReplayRequest(tmp_path, 0, 0)
            )
        assert raised.value.code == 128 + signal.SIGTERM
        assert not list(tmp_path.iterdir())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_secrets_of_an_error_are_redacted(tmp_path, monkeypatch):
    error = RankError("rank 0 raised OSError: no answer from s3://me:hunter2@store (train.py:3)")
    failed = session_launch.SessionRun([[]], 1.0, error, "")
    monkeypatch.setattr(replay_runner, "launch_session", lambda *order, **options: failed)
    program = Program("script", "train.py")
    request = ReplayRequest(tmp_path, 0, 0)
    failure = replay_runner.run_program(program, Base(), request).failure
    assert "no answer from s3://[redacted]@store" in failure
