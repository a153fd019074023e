"""The secret of a run: where it is read, and where it is refused."""

from __future__ import annotations

import os

import pytest

import warm
from lockstep.comm.transport.secret import SECRET, make_secret
from lockstep.kernel.errors import FileError, RendezvousError, UsageError
from lockstep.launcher import rendezvous
from lockstep.launcher.environment import RankInfo
from lockstep.launcher.launch_config import LaunchConfig

TEXT = "5ec7e7" * 10 + "5ec7"
PATIENCE = 60.0


def test_without_a_file_or_variable_there_is_no_secret():
    assert make_secret(None, 0, {}) is None


def test_the_file_comes_before_the_variable(tmp_path):
    path = tmp_path / "run.secret"
    secret = make_secret(str(path), 0, {})
    assert make_secret(None, 0, {SECRET: TEXT}) == bytes.fromhex(TEXT)
    assert make_secret(str(path), 1, {SECRET: TEXT}) == secret


def test_only_host_0_creates_the_file(tmp_path):
    path = tmp_path / "run.secret"
    with pytest.raises(UsageError, match="there is no such file here; host 0 creates it: copy it"):
        make_secret(str(path), 1, {})
    assert not path.exists()
    with pytest.raises(FileError, match="the secret of a run cannot be read"):
        make_secret(str(tmp_path), 1, {})


def test_a_variable_without_a_secret():
    with pytest.raises(UsageError, match="LOCKSTEP_SECRET contains no secret of a run: 64 hexa"):
        make_secret(None, 0, {SECRET: "a password"})


def test_a_launch_on_one_host_ignores_the_secret(tmp_path):
    """Also where it has no private store, as on macOS."""
    script = "import os, lockstep as ls\ndel os.environ['LOCKSTEP_STORE']\nls.init(timeout=20)\n"
    (tmp_path / "train.py").write_text(script)
    done = warm.run(
        [*warm.LOCKSTEP, "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {SECRET: TEXT},
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("launcher", ["lockstep", "torchrun", "srun"])
def test_a_secret_is_refused_where_the_store_admits_everyone(monkeypatch, launcher):
    monkeypatch.setenv(SECRET, TEXT)
    info = RankInfo(1, 2, 0, 1, 1, "127.0.0.1", 29511, launcher=launcher)
    with pytest.raises(RendezvousError, match=r"^rank 1: LOCKSTEP_SECRET is set, but the store"):
        rendezvous.wait_for_ranks(info, 10.0)


def test_a_secret_file_is_for_elastic_runs():
    with pytest.raises(UsageError, match=r"^--secret-file f: only the launchers of an elastic run"):
        LaunchConfig("train.py", nnodes=2, secret_file="f")
    LaunchConfig("train.py", nnodes=2, secret_file="f", min_nprocs=1)
