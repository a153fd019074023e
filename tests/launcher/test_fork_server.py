"""The fork server: kept between launches, replaced if it would start differently now."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch

import lockstep as ls
import warm
from lockstep.comm import backend, native_module
from lockstep.launcher import fork_server
from lockstep.launcher.fork_server import (
    get_fork_server,
    get_fork_server_pid,
)
from lockstep.launcher.launch import start
from processes import until

_folder: tempfile.TemporaryDirectory[str]  # kept until the rank exits


@pytest.fixture(autouse=True, scope="module")
def new_interpreters() -> Iterator[None]:
    """Start fork servers as users do; the one of other tests is a fork of a warm process.

    All tests but the last one share the first one, which can do the most.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "spawn_fork_server", warm.SPAWN_FORK_SERVER)
        patch.setattr(fork_server, "_current", None)
        get_fork_server()
        yield
        if fork_server._current is not None:
            fork_server._current.close()


def parent() -> int:
    return os.getppid()


def test_launches_share_a_fork_server():
    first, second = (set(ls.launch(parent, nprocs=2)) for _ in range(2))
    assert first == second == {get_fork_server_pid()}


def test_other_variables_and_the_working_directory_reach_ranks_of_the_same_fork_server(
    monkeypatch, tmp_path
):
    def seen() -> tuple[int, str | None, str]:
        return os.getppid(), os.environ.get("SOME_VARIABLE"), os.getcwd()

    ((before, _, _),) = ls.launch(seen)
    monkeypatch.setenv("SOME_VARIABLE", "some value")
    monkeypatch.chdir(tmp_path)
    assert ls.launch(seen) == [(before, "some value", str(tmp_path))]


def test_ranks_read_tmpdir_again_even_if_the_fork_server_has_read_it(monkeypatch, tmp_path):
    # torch's compiler looks the folder up when it is imported
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert ls.launch(tempfile.gettempdir) == [str(tmp_path)]


def test_ranks_draw_different_random_numbers_but_the_same_torch_seed():
    def draw() -> tuple[float, float, int]:
        import random

        import numpy
        import torch

        return random.random(), numpy.random.random(), torch.initial_seed()

    drawn = ls.launch(draw, nprocs=3)
    assert len({python for python, _, _ in drawn}) == 3
    assert len({numpy for _, numpy, _ in drawn}) == 3
    assert len({seed for _, _, seed in drawn}) == 1


def test_a_rank_finalizes_what_it_made(tmp_path):
    def make() -> None:
        global _folder
        _folder = tempfile.TemporaryDirectory(dir=tmp_path, prefix="rank-")
        (tmp_path / "made").touch()

    ls.launch(make)
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def train() -> set[str]:
    """Train one step; return the modules that were imported since the start of the rank."""
    before = {*sys.modules}
    ls.init()
    model = torch.nn.Linear(2, 1)
    loss = torch.nn.MSELoss()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    ls.Trainer(model, loss, sgd, microbatches=2, loggers=(), progress=False).step(
        (torch.ones(4, 2), torch.ones(4, 1))
    )
    return {*sys.modules} - before


def test_ranks_that_train_find_imported_what_they_need():
    expected = {"lockstep.comm.native.binding", "lockstep.training.trainer"}
    assert ls.launch(lambda: expected <= {*sys.modules}) == [True]
    assert ls.launch(train, nprocs=2) == [set(), set()]


@pytest.mark.skipif(not backend.available(), reason="the extension is not built here")
def test_ranks_find_the_backend_loaded_unless_they_may_need_another_one(monkeypatch, tmp_path):
    def count() -> int:
        return native_module.load_native.cache_info().currsize

    assert ls.launch(count) == [1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ls.launch(count) == [0]


def test_a_fork_server_that_has_launched_nothing_is_not_waited_for():
    server = warm.SPAWN_FORK_SERVER("time.sleep(600)")  # reads no message, as during its imports
    server.close()
    assert server.has_exited()


def test_ranks_outlive_the_thread_that_launched_them():
    launched = []
    thread = threading.Thread(target=lambda: launched.append(start(parent, nprocs=2)))
    thread.start()
    thread.join()
    assert len(launched[0].join(timeout=30)) == 2


def test_a_variable_that_is_read_at_startup_needs_a_new_fork_server(monkeypatch):
    """The earlier one exits after its last launch."""
    gate, opened = os.pipe()
    os.set_inheritable(gate, True)
    path = f"/proc/{os.getpid()}/fd/{gate}"

    def wait() -> int:
        with open(path, "rb", buffering=0) as file:
            file.read(1)
        return os.getppid()

    def seen() -> tuple[int, str | None]:
        return os.getppid(), os.environ.get("PYTHONLOCKSTEPTEST")

    ((before, nothing),) = ls.launch(seen)
    launched = start(wait)
    assert launched.processes
    monkeypatch.setenv("PYTHONLOCKSTEPTEST", "yes")
    ((after, told),) = ls.launch(seen)
    assert (nothing, told) == (None, "yes")
    assert before != after
    os.write(opened, b"x")
    assert launched.join(timeout=30) == [before]
    os.close(gate)
    os.close(opened)
    deadline = time.monotonic() + 30
    while get_fork_server_pid() == after and psutil.pid_exists(before):
        assert time.monotonic() < deadline, "the earlier fork server still runs"
        time.sleep(0.01)


def test_a_fork_server_that_still_imports_exits_with_its_launcher(tmp_path):
    """Although another process, here this one, holds the launcher's socket."""
    (tmp_path / "endless.py").write_text(f"""
import importlib
from pathlib import Path
Path({str(tmp_path / "imports")!r}).touch()
while True:
    try:
        importlib.import_module("no_such_module")
    except ImportError:
        pass
""")
    launcher = subprocess.Popen(["sleep", "600"])
    call = f"lockstep.launcher.fork_server_main.main({{}}, {launcher.pid}, ['endless'])"
    server = warm.SPAWN_FORK_SERVER(call, path=[str(tmp_path), *filter(None, sys.path)])
    try:
        until((tmp_path / "imports").exists, "it imports nothing", 60)
        assert not server.has_exited()
    finally:
        launcher.kill()
        launcher.wait()
    try:
        until(server.has_exited, "it outlived its launcher", 60)
    finally:
        server.close()
