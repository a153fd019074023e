"""A build: what is compiled, verified and published."""

from __future__ import annotations

import os
import sysconfig

import pytest

from compilers import install_recorder
from lockstep.comm import backend
from lockstep.comm.native.binding import find_bindings
from lockstep.comm.native.binding_folder import list_bindings
from lockstep.comm.native.build import MODULE, CompilationError, build_binding, find_compiler
from lockstep.comm.native.extension_abi import CSRC, FLAGS, current_abi, list_sources


def show_nothing(done: int, total: int) -> None:
    pass


@pytest.mark.skipif(not backend.available(), reason="the extension is not built here")
def test_everything_is_compiled_once_with_progress(tmp_path, monkeypatch):
    recorder = install_recorder(tmp_path, monkeypatch, find_bindings()[0])
    folder = tmp_path / "bindings"
    log = tmp_path / "log"
    folder.mkdir(mode=0o700)
    shown: list[tuple[int, int]] = []
    verified = []

    def verify(module):
        verified.append(module.stat().st_ino)
        assert list_bindings(folder, is_trusted=False) == {}

    abi = current_abi()
    module = build_binding(folder, abi, log, lambda *counts: shown.append(counts), verify)
    assert module == folder / abi.name / MODULE
    assert verified == [module.stat().st_ino]
    assert list_bindings(folder, is_trusted=False) == {abi: module}
    assert os.listdir(folder) == [abi.name]
    *compiled, link = recorder.calls()
    sources = [CSRC / "binding/bind.cpp", *list_sources(CSRC / "core", ".cpp")]
    for source in [*sources, "/binding.cpp"]:
        assert sum(f"{source} -o" in call for call in compiled) == 1, source
    assert len(compiled) == len(sources) + 1
    for call in compiled:
        assert set(FLAGS) < set(call.split())
    assert "-ltorch_python" in link
    assert "rpath" not in link
    total = len(compiled) + 1
    assert shown == [(done, total) for done in range(1, total + 1)]
    assert all(source in log.read_text() for source in map(str, sources))

    def fail(module):
        raise RuntimeError("it does not work")

    with pytest.raises(RuntimeError):
        build_binding(folder, current_abi(), log, show_nothing, fail)
    assert os.listdir(folder) == [abi.name]


def test_which_compiler(tmp_path):
    assert find_compiler({"CXX": "sh -x 'a b'", "PATH": "/bin"}) == ("sh", "-x", "a b")
    with pytest.raises(CompilationError, match=r"the compiler g-- \(from CXX\) was not found"):
        find_compiler({"CXX": "g--"})
    with pytest.raises(CompilationError, match=r"there is no C\+\+ compiler"):
        find_compiler({"PATH": str(tmp_path)})
    (tmp_path / "g++").touch(0o755)
    assert find_compiler({"PATH": str(tmp_path)}) == ("g++",)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    install_recorder(tmp_path, monkeypatch, None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilationError, match=r"headers of Python are missing \(no Python\.h in"):
        build_binding(tmp_path, current_abi(), tmp_path / "log", show_nothing)
    (tmp_path / "Python.h").touch()
    with pytest.raises(CompilationError, match="there is no ninja"):
        build_binding(tmp_path, current_abi(), tmp_path / "log", show_nothing)
