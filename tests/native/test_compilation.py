"""The plan of a compilation, and its execution with a compiler that records its calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from compilers import install_recorder
from lockstep.native.compilation import (
    CSRC,
    FLAGS,
    CompilationError,
    TorchBuild,
    compile_native,
    find_compiler,
    list_sources,
    plan_binding,
    plan_core,
    plan_link,
)
from processes import alive, until

TORCH = TorchBuild(Path("/torch"))
INSTALLED = TorchBuild(Path(torch.__file__).parent)


def test_the_plan():
    core = plan_core(["g++", "-v"], [Path("/c/heap.cpp"), Path("/c/x/heap.cpp")], Path("/o"))
    assert [each.output for each in core] == [Path("/o/c-heap.o"), Path("/o/x-heap.o")]
    assert core[0].arguments[:2] == ("g++", "-v")
    assert core[0].arguments[-4:] == ("-c", "/c/heap.cpp", "-o", "/o/c-heap.o")
    sources = [Path(f"/b/{name}.cpp") for name in ("backend", "bind", "new", "work")]
    bind, rest = plan_binding(["g++"], sources, Path("/c"), TORCH, "/python", Path("/o"))
    assert bind.arguments[-4:] == ("-c", "/b/bind.cpp", "-o", "/o/bind.o")
    assert rest.arguments[-8:-4] == ("-include", "/b/backend.cpp", "-include", "/b/new.cpp")
    assert rest.arguments[-4:] == ("-c", "/b/work.cpp", "-o", "/o/backend.o")
    for each in (*core, bind, rest):
        assert set(FLAGS) < set(each.arguments)
    link = plan_link(["g++"], [bind.output], Path("/o/libcore.a"), TORCH, Path("/o/m.so"))
    assert "-L/torch/lib" in link.arguments
    assert not any("rpath" in argument for argument in link.arguments)
    # The archive comes before the libraries and after what needs it.
    names = ("/o/bind.o", "/o/libcore.a", "-ltorch_cpu")
    places = [link.arguments.index(name) for name in names]
    assert places == sorted(places)


def test_the_core_includes_nothing_of_torch_and_nothing_of_python():
    for path in list_sources(CSRC / "core", ".cpp", ".h", ".inc"):
        for line in Path(path).read_text().splitlines():
            if line.startswith("#include"):
                assert not any(name in line for name in ("torch", "ATen", "c10", "Python", "pyb"))


def test_which_compiler(monkeypatch, tmp_path):
    assert find_compiler({"CXX": "sh -x 'a b'", "PATH": "/bin"}) == ("sh", "-x", "a b")
    with pytest.raises(CompilationError, match=r"the compiler g-- \(from CXX\) was not found"):
        find_compiler({"CXX": "g--"})
    with pytest.raises(CompilationError, match=r"there is no C\+\+ compiler"):
        find_compiler({"PATH": str(tmp_path)})
    (tmp_path / "g++").touch(0o755)
    assert find_compiler({"PATH": str(tmp_path)}) == ("g++",)


def test_everything_is_compiled_once_with_progress(tmp_path, monkeypatch):
    recorder = install_recorder(tmp_path, monkeypatch, None)
    shown: list[tuple[str, int, int]] = []
    log = tmp_path / "log"
    out = tmp_path / "out"
    out.mkdir()
    compile_native(out, log, INSTALLED, None, lambda *each: shown.append(each))
    compiled = " ".join(recorder.calls())
    for path in list_sources(CSRC, ".cpp"):
        assert compiled.count(f" {path}") == 1, path
    num_core = len(list_sources(CSRC / "core", ".cpp"))
    assert shown[:2] == [("binding", 0, 2), ("core", 0, num_core)]
    assert {("binding", 2, 2), ("core", num_core, num_core)} < {*shown}
    assert shown[-4:] == [("core", 0, 1), ("core", 1, 1), ("binding", 0, 1), ("binding", 1, 1)]
    assert log.read_text().count("$ ") == len(recorder.calls())
    recorder.log.unlink()
    compile_native(out, log, INSTALLED, out / "libcore.a", lambda *each: None)
    assert recorder.parts() == ["binding", "link"]


def test_the_first_error_ends_the_other_compilers(tmp_path, monkeypatch):
    """One call waits forever; without its end, the error would wait too."""
    recorder = install_recorder(tmp_path, monkeypatch, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    monkeypatch.setenv("BLOCK", "bind.cpp")
    monkeypatch.setenv("FAIL", "sync.cpp")
    with pytest.raises(CompilationError) as caught:
        compile_native(tmp_path, tmp_path / "log", INSTALLED, None, lambda *each: None)
    assert str(caught.value).endswith("/recorder: x.cpp:3:7: error: no room for sync.cpp")
    assert not alive(int(recorder.started.read_text()))
    assert "sync.cpp" in (tmp_path / "log").read_text()


def test_an_interruption_ends_the_compilers(tmp_path, monkeypatch):
    recorder = install_recorder(tmp_path, monkeypatch, None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    monkeypatch.setenv("BLOCK", "bind.cpp")

    def interrupt(part: str, done: int, total: int) -> None:
        if done:
            until(recorder.started.exists, "the call does not block", 20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_native(tmp_path, tmp_path / "log", INSTALLED, None, interrupt)
    assert not alive(int(recorder.started.read_text()))


def test_missing_headers_are_named(tmp_path, monkeypatch):
    install_recorder(tmp_path, monkeypatch, None)
    with pytest.raises(CompilationError, match=r"headers of torch are missing \(no include in"):
        compile_native(tmp_path, tmp_path / "log", TorchBuild(tmp_path), None, lambda *each: None)
