"""The command `lockstep scale`: what it refuses, and what it asks a run for."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lockstep.cli import cli
from lockstep.elastic.scale_request import SCALE_FILE, request_ranks, take_request
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import describe_launch, write_description
from lockstep.tools.commands import scale


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The folder of an elastic run that no launcher serves."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "digits"
    folder.mkdir(parents=True)
    write_description(folder, describe_launch("script", "train.py", [], 4, 1, 2))
    return folder


def scale_run(*arguments: str) -> None:
    CliRunner().invoke(cli, ["scale", *arguments], catch_exceptions=False, standalone_mode=False)


def test_a_run_that_no_launcher_serves(run_folder, monkeypatch):
    monkeypatch.setattr(scale, "TIMEOUT", 0.05)
    with pytest.raises(UsageError, match="runs/digits is not running: no launcher has answered"):
        scale_run("digits", "3")
    assert not (run_folder / SCALE_FILE).exists()


def test_what_cannot_be_scaled(run_folder):
    with pytest.raises(UsageError, match=r"lockstep scale mnist: there is no run runs/mnist"):
        scale_run("mnist", "3")
    with pytest.raises(UsageError, match=r"continue with 1 rank: it was started with --min 2"):
        scale_run("digits", "1")
    description = json.loads((run_folder / "launch.json").read_text())
    (run_folder / "launch.json").write_text(json.dumps({**description, "exit_status": 0}))
    with pytest.raises(UsageError, match=r"has ended; continue it with: lockstep run --resume"):
        scale_run("digits", "3")
    (run_folder / "launch.json").write_text(json.dumps({**description, "min_nprocs": None}))
    with pytest.raises(UsageError, match=r"digits is not an elastic run: start it with"):
        scale_run("digits", "3")


def test_a_request_is_taken_once(run_folder):
    request_ranks(run_folder, 3)
    assert take_request(run_folder) == 3
    assert take_request(run_folder) is None
    for content in ("", "[]", '{"ranks": 0}', '{"ranks": "many"}'):
        (run_folder / SCALE_FILE).write_text(content)
        assert take_request(run_folder) is None
        assert not (run_folder / SCALE_FILE).exists()
