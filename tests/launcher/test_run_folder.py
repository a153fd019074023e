"""The lock of a run folder: who waits for whom, who is named, and who wins."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.kernel.errors import FileError, UsageError
from lockstep.launcher import run_folder
from lockstep.launcher.run_folder import (
    create_run_folder,
    hold_run,
    release_run,
    wait_until_free,
)
from lockstep.record.recorder import Recorder

# Runs `code` with `folder` in scope, says so, and stays until its standard input is closed.
USER = """
import os, sys
from lockstep.kernel.errors import UsageError
from lockstep.launcher.run_folder import *
folder = sys.argv[1]
{code}
sys.stdin.read()
"""
HOLD = "hold_run(folder); print(os.getpid(), flush=True)"


@contextmanager
def process(folder: Path, code: str = HOLD) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process beside; give it and the first line that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", USER.format(code=code), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as user:
        assert user.stdout is not None
        try:
            yield user, user.stdout.readline().strip()
        finally:
            user.stdin.close()  # type: ignore[union-attr]
            user.wait(30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(run_folder, "_held", {})  # runs of other tests are held until the exit
    yield tmp_path
    release_run(tmp_path)


CLAIM = "wait_until_free(folder); print(os.getpid(), flush=True)"


def test_the_process_that_has_claimed_a_run_is_named(folder):
    with process(folder, CLAIM) as (_, pid), pytest.raises(UsageError) as caught:
        wait_until_free(folder, timeout=0.1)
    assert str(caught.value) == (
        f"{folder} is still in use after 0.1 s (the last one to begin or continue it was process "
        f"{pid} on {os.uname().nodename}): continue the run when its processes have exited"
    )
    assert not run_folder._held


def test_a_run_is_free_once_its_processes_have_exited(folder):
    with process(folder) as (user, _):
        user.stdin.close()
        wait_until_free(folder, timeout=30)
        user.wait(30)
    assert run_folder._held


def test_a_forked_worker_that_outlives_its_parent_holds_the_run(folder):
    fork = "hold_run(folder); pid = os.fork()\nif pid: print(pid, flush=True); os._exit(0)"
    refused = pytest.raises(UsageError, match=r"/\S+ is still in use after 0.2 s: continue")
    with process(folder, fork), refused:
        wait_until_free(folder, timeout=0.2)
    wait_until_free(folder, timeout=30)


def test_one_of_several_that_continue_a_run_at_once_wins(folder):
    claim = """
print(flush=True)
sys.stdin.readline()
try:
    wait_until_free(folder, 1.0)
except UsageError as error:
    print(error, flush=True)
else:
    print("won", flush=True)
"""
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER.format(code=claim), folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    try:
        for user in users:
            user.stdout.readline()
        for user in users:
            user.stdin.write("go\n")
            user.stdin.flush()
        said = [user.stdout.readline().strip() for user in users]
    finally:
        for user in users:
            user.communicate(timeout=30)
    (winner,) = [user.pid for user, words in zip(users, said, strict=True) if words == "won"]
    others = [words for words in said if words != "won"]
    assert len(others) == 3
    assert all(f" was process {winner} on " in words for words in others)


def test_a_claim_that_slips_into_anothers_is_noticed(folder, monkeypatch):
    """The kernel may give the lock to another process while it is made a shared one."""
    thief = run_folder._open_lock(folder)
    slipped: list[bool] = []

    def lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool | None:
        if kind == fcntl.LOCK_SH and descriptor != thief and not slipped:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            slipped.append(run_folder._try_to_claim(thief))
        return real(descriptor, kind)

    real = run_folder.lock_file
    monkeypatch.setattr(run_folder, "lock_file", lock)
    with pytest.raises(UsageError, match=r"still in use after 0.1 s"):
        wait_until_free(folder, timeout=0.1)
    assert slipped == [True]
    os.close(thief)
    wait_until_free(folder, timeout=0)


def test_a_process_does_not_wait_for_its_own_launch(folder, monkeypatch):
    hold_run(folder)
    wait_until_free(folder, timeout=0)  # itself
    wait = "wait_until_free(folder, 0); print('free', flush=True)"
    with process(folder, wait) as (_, said):  # its parent
        assert said == "free"
    release_run(folder)
    with process(folder):
        monkeypatch.setenv("LOCKSTEP_LAUNCHER", "job")
        monkeypatch.setenv("LOCKSTEP_RUN", str(folder))
        wait_until_free(folder, timeout=0)  # the folder that its launcher gave it


def test_a_variable_without_a_launcher_is_not_believed(folder, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_RUN", str(folder))
    with process(folder), pytest.raises(UsageError, match="still in use"):
        wait_until_free(folder, timeout=0)


def test_holding_waits_for_a_claim_but_not_for_ever(folder, monkeypatch):
    monkeypatch.setattr(run_folder, "EXIT_TIMEOUT", 0.1)
    exclusive = """
import fcntl
file = open(folder + "/run.lock", "w"); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True)
"""
    with process(folder, exclusive), pytest.raises(UsageError, match=r"in use after 0.1 s: "):
        hold_run(folder)
    hold_run(folder)
    with process(folder) as (_, pid):  # and shares it with others
        assert pid


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_file_systems_without_locks(folder, monkeypatch, code):
    def fail(descriptor: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    wait_until_free(folder, timeout=0)
    hold_run(folder)


def test_folders_that_cannot_be_written(folder):
    hold_run(folder / "missing")
    wait_until_free(folder / "missing", timeout=0)
    target = folder / "target"
    (folder / "run.lock").symlink_to(target)
    hold_run(folder)
    assert not target.exists()


def test_the_lock_is_for_its_owner_alone(folder):
    hold_run(folder)
    assert stat.S_IMODE((folder / "run.lock").stat().st_mode) == 0o600


def test_the_command_of_a_rank_is_that_of_its_launcher(tmp_path):
    argv = ["job/train.py", "--lr", "0.1"]
    assert run_folder.command_words({}, argv) == argv
    described = run_folder.describe_launch("script", argv[0], argv[1:], 2, 1)
    run_folder.write_description(tmp_path, described)
    launched = {run_folder.RUN: str(tmp_path)}
    assert run_folder.command_words(launched, ["other"]) == ["lockstep", "run", "-n", "2", *argv]
    described = run_folder.describe_launch("module", "job.train", argv[1:], 4, 2)
    run_folder.write_description(tmp_path, described)
    assert run_folder.command_words(launched | {"MASTER_ADDR": "host0"}, argv) == [
        *("lockstep", "run", "-n", "4", "--nnodes", "2", "--master-addr", "host0"),
        *("-m", "job.train", "--lr", "0.1"),
    ]
    (tmp_path / "launch.json").write_text("{")
    assert run_folder.command_words(launched, argv) == argv, "a damaged file ends no training"


def test_run_folders_of_one_minute_have_different_names(tmp_path: Path) -> None:
    name = run_folder.name_run("digits")
    folders = [create_run_folder(tmp_path / "runs", name) for _ in range(4)]
    assert len(set(folders)) == 4
    assert all(each.is_dir() and each.name.startswith("digits-20") for each in folders)
    Recorder(folders[0]).close()


def test_a_run_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(FileError, match="is not a folder"):
        create_run_folder(tmp_path / "runs", "digits")
    with pytest.raises(FileError, match="cannot be created"):
        create_run_folder(Path("/proc/runs"), "digits")


def test_linked_runs_of_a_folder_that_is_being_renamed(tmp_path: Path, monkeypatch) -> None:
    """It was gone after it had been seen, which ended the thread that follows a record."""
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    assert run_folder.find_linked_runs(tmp_path / "renamed") == []
