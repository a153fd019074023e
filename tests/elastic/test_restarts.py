"""The states from which new processes continue: folders that nobody leaves behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import warm
from lockstep.elastic import restarts
from lockstep.elastic.restarts import StateFolder, remove_leftovers

HOLD = """
import sys
from pathlib import Path
from lockstep.elastic import restarts

restarts.SHARED_MEMORY = Path(sys.argv[1])
states = restarts.StateFolder(None)
(states.begin_transfer() / "state").write_text("a")
print(states.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Stand in for /dev/shm."""
    monkeypatch.setattr(restarts, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_the_folder_of_a_killed_launcher_is_removed_by_the_next_launch(memory):
    command = [sys.executable, "-c", HOLD, str(memory)]
    with warm.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        left = Path(process.stdout.readline().strip())
        own = StateFolder(None)
        assert left.exists()  # its launcher lives
        process.send_signal(signal.SIGKILL)
    assert {*memory.iterdir()} == {left, own.path}
    later = StateFolder(None)
    assert {*memory.iterdir()} == {own.path, later.path}
    for states in (own, later):
        assert states.path.stat().st_mode & 0o777 == 0o700
        states.remove()
    assert not [*memory.iterdir()]


def test_only_folders_of_launchers_are_removed(memory, monkeypatch):
    """Whoever writes a file there, or a link, does not decide what is removed."""
    elsewhere = memory / "elsewhere"
    elsewhere.mkdir()
    (memory / "lockstep-1-link").symlink_to(elsewhere)
    (memory / "lockstep-1-file").touch()
    (memory / "lockstep-other").mkdir()
    (memory / "lockstep-1-abc").mkdir()
    before = {*memory.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    remove_leftovers(memory)
    assert {*memory.iterdir()} == before
    monkeypatch.undo()
    remove_leftovers(memory)
    assert {*memory.iterdir()} == before - {memory / "lockstep-1-abc"}
