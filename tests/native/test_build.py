"""A build: what is compiled, verified and published."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from compilers import install_recorder
from lockstep.native.binding_folder import list_bindings
from lockstep.native.binding_key import current_key
from lockstep.native.build import build_binding, build_core
from lockstep.native.compilation import MODULE


def show_nothing(part: str, done: int, total: int) -> None:
    pass


def test_the_core_serves_every_torch(tmp_path, monkeypatch):
    recorder = install_recorder(tmp_path, monkeypatch, None)
    folder, log = tmp_path / "bindings", tmp_path / "log"
    folder.mkdir(mode=0o700)
    build_core(folder, log, show_nothing)
    assert recorder.parts() == ["archive", "core"]
    assert os.listdir(folder) == ["core"]

    # Another torch, which only its key knows: the binding alone is compiled for it.
    first, second = current_key(), replace(current_key(), torch="99.0.0")
    recorder.log.unlink()
    modules = [build_binding(folder, key, log, show_nothing) for key in (first, second)]
    assert recorder.parts() == ["binding", "link"]
    assert modules == [folder / key.name / MODULE for key in (first, second)]
    assert list_bindings(folder, is_trusted=False) == dict(
        zip((first, second), modules, strict=True)
    )
    assert sorted(os.listdir(folder)) == sorted(["core", first.name, second.name])

    # Another compiler's core is not linked.
    recorder.log.unlink()
    text = (tmp_path / "recorder").read_text()
    (tmp_path / "recorder").write_text(text.replace("recorder 1.0", "recorder 2.0"))
    build_binding(folder, replace(first, torch="99.1.0"), log, show_nothing)
    assert recorder.parts() == ["archive", "binding", "core", "link"]


def test_nothing_is_published_that_does_not_work(tmp_path, monkeypatch):
    install_recorder(tmp_path, monkeypatch, None)
    folder = tmp_path / "bindings"
    folder.mkdir()

    def fail(module):
        assert module.exists()
        raise RuntimeError("it does not work")

    with pytest.raises(RuntimeError):
        build_binding(folder, current_key(), tmp_path / "log", show_nothing, fail)
    assert os.listdir(folder) == ["core"]
