"""The command `lockstep build`: what it compiles, what it says, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warm
from compilers import Recorder, install_recorder
from lockstep.cli import cli
from lockstep.comm import backend
from lockstep.comm.native.binding import find_bindings
from lockstep.comm.native.binding_folder import lock_folder
from lockstep.comm.native.build import MODULE
from lockstep.comm.native.extension_abi import current_abi
from lockstep.comm.native.self_test import SelfTestError, run_self_test
from lockstep.kernel.errors import FileError, WorkError
from lockstep.tools.commands import build as command
from processes import alive, until

pytestmark = [
    pytest.mark.skipif(not backend.available(), reason="the extension is not built here"),
]

PATIENCE = 60.0  # seconds


@pytest.fixture
def working():
    """A module that works: the one of this process."""
    return find_bindings()[0]


@pytest.fixture
def recorder(working, tmp_path, monkeypatch) -> Recorder:
    """A compiler whose modules work; bindings are in tmp_path only."""
    return install_recorder(tmp_path, monkeypatch, working)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache/lockstep/bindings"


@pytest.fixture
def trusting(monkeypatch):
    """Leave out the self-test, which takes seconds."""
    monkeypatch.setattr(command, "run_self_test", lambda module: None)


def build(*arguments: str) -> str:
    """Run the command, and return what it printed."""
    done = CliRunner().invoke(
        cli, ["build", *arguments], catch_exceptions=False, standalone_mode=False
    )
    return done.output


def test_a_build_is_tested_published_and_then_found(recorder, cache, monkeypatch):
    tested: list[Path] = []
    monkeypatch.setattr(command, "run_self_test", tested.append)
    said = build()
    module = cache / current_abi().name / MODULE
    assert len(tested) == 1
    assert find_bindings() == [module]
    assert recorder.parts() == ["binding", "core", "link"]
    assert "testing with two ranks\n" in said
    assert f"built for torch {torch.__version__} in" in said
    assert f"and tested: {module} (" in said
    for path in (cache.parent, cache, module.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert module.stat().st_mode & 0o022 == 0
    assert sorted(os.listdir(cache)) == sorted([".lock", "build.log", module.parent.name])

    tested.clear()
    recorder.log.unlink()
    assert f"nothing to build: {module} (" in build()
    assert recorder.calls() == []
    assert tested == [module]

    def fail_unless_new(path: Path) -> None:
        if path == module:
            raise SelfTestError("a rank was killed by SIGSEGV")

    monkeypatch.setattr(command, "run_self_test", fail_unless_new)
    assert f"{module} fits this torch but does not work (a rank was killed by SIGSEGV)" in build()
    assert recorder.parts() == ["binding", "core", "link"]

    assert f"removed the bindings in {cache} (" in build("--clean")
    assert os.listdir(cache) == [".lock"]


def test_a_failed_compilation_is_one_sentence(recorder, cache, monkeypatch, trusting):
    monkeypatch.setenv("FAIL", "sync.cpp")
    with pytest.raises(WorkError) as caught:
        build()
    assert str(caught.value) == (
        f"build: {os.environ['CXX']}: x.cpp:3:7: error: no room for sync.cpp (all output: "
        f"{cache}/build.log): the compiler must know C++20; set CXX to use another one"
    )
    assert not list(cache.glob("*/_native*"))
    assert not list(cache.glob(".build-*"))
    assert "no room for sync.cpp" in (cache / "build.log").read_text()

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(WorkError, match=r"no-such-compiler \(from CXX\) was not found.*apt inst"):
        build()


def test_a_module_that_does_not_work_is_not_used(recorder, cache, monkeypatch):
    def fail(module: Path) -> None:
        raise SelfTestError("a rank was killed by SIGSEGV")

    monkeypatch.setattr(command, "run_self_test", fail)
    with pytest.raises(WorkError, match=r"the new binding does not work \(.*so it is not used"):
        build()
    assert not list(cache.glob("*/_native*"))


def test_a_self_test_ends_with_what_went_wrong(working, tmp_path, monkeypatch):
    run_self_test(working)
    crash = tmp_path / "crash"  # in the place of the interpreter
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    with pytest.raises(SelfTestError, match="a rank was killed by SIGSEGV"):
        run_self_test(working)
    crash.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/started\nread line < {tmp_path}/fifo\n")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("lockstep.comm.native.self_test.TIMEOUT", 0.5)
    with pytest.raises(SelfTestError, match=r"two ranks did not end within 0\.5 s"):
        run_self_test(working)
    assert not alive(int((tmp_path / "started").read_text()))


def test_two_builds_at_once_compile_once(recorder, cache, trusting, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(command, "log", said.append)
    second = threading.Thread(target=command._build, args=(cache, False))
    with lock_folder(cache, PATIENCE):
        second.start()
        until(lambda: said, "the second build does not wait", PATIENCE)
        command._compile(cache, current_abi(), False)  # what the first build does under its lock
    second.join(PATIENCE)
    assert said[0] == f"another build is running (process {os.getpid()}): waiting for it"
    assert said[1].startswith("nothing to build")
    assert sum("-shared" in call for call in recorder.calls()) == 1


def test_a_cache_that_cannot_be_used_is_named(recorder, cache, trusting, monkeypatch):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(FileError, match=r"writable for others \(mode 0777\): correct that or set"):
        build()
    cache.chmod(0o700)
    (cache / ".lock").mkdir()  # as root, a test can write to a folder without permission
    with pytest.raises(
        FileError, match=r"\.lock cannot be written \(.*\): correct that or set XDG_CACHE"
    ):
        build()
    (cache / ".lock").rmdir()
    cache.rmdir()
    cache.parent.rmdir()
    cache.parent.write_text("a file")
    with pytest.raises(FileError, match=r"because .* cannot be read \(Not a directory\)"):
        build()
    assert recorder.calls() == []


def test_ctrl_c_leaves_nothing_half(recorder, cache, monkeypatch):
    monkeypatch.setenv("BLOCK", "-shared")  # everything is compiled, and not linked
    program = (
        "from pathlib import Path\n"
        "from lockstep.comm.native import binding\n"
        f"binding.PACKAGE_FOLDER = Path({str(cache)!r}, 'none')\n"
        "from lockstep.cli import main; import sys; sys.argv = ['lockstep', 'build']; main()"
    )
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        recorder.started.unlink(missing_ok=True)
        with warm.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True
        ) as process:
            until(recorder.started.exists, "nothing was linked", PATIENCE)
            process.send_signal(number)
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode in (status, -number), said
        assert "Traceback" not in said
        assert not alive(int(recorder.started.read_text()))
        assert sorted(os.listdir(cache)) == [".lock", "build.log"]


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_real_build(tmp_path, monkeypatch):
    """From nothing, with a compiler that links its library statically, as `make` does not."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -static-libstdc++\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for imported in ("binding", "binding_folder"):
        monkeypatch.setattr(f"lockstep.comm.native.{imported}.PACKAGE_FOLDER", tmp_path / "none")
    said = build()
    assert "and tested" in said
    run_self_test(find_bindings()[0])
