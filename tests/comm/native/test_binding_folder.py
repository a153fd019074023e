"""Where bindings are kept: what is trusted, locked, published and removed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.comm.native.binding_folder import (
    empty_folder,
    get_cache_folder,
    list_bindings,
    lock_folder,
    reason_not_trusted,
    replace_folder,
    temporary_folder,
    write_abi,
)
from lockstep.comm.native.extension_abi import ExtensionABI
from processes import until

ABI = ExtensionABI(
    "2.13.0", "a" * 40, 1, "cpython-311-x86_64-linux-gnu", "linux-x86_64", "b", "-O3"
)

PATIENCE = 20.0  # seconds


def add_binding(folder: Path, abi: ExtensionABI) -> Path:
    made = folder / abi.name
    made.mkdir(mode=0o700, parents=True)
    module = made / "_native.so"
    module.write_text("a module")
    write_abi(made, abi)
    for path in (made, module, made / "key.json"):
        path.chmod(0o700)
    return module


def test_the_cache_is_where_its_specification_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/ann")
    assert get_cache_folder() == Path("/scratch/ann/lockstep/bindings")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert get_cache_folder() == Path("/home/ann/.cache/lockstep/bindings")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert get_cache_folder().is_absolute()


def test_only_what_this_user_alone_can_write_is_trusted(tmp_path, monkeypatch):
    module = add_binding(tmp_path, ABI)
    assert list_bindings(tmp_path, is_trusted=False) == {ABI: module}
    for path in (module, module.parent, module.with_name("key.json")):
        for mode in (0o720, 0o702):
            path.chmod(mode)
            assert f"is writable for others (mode {mode:04o})" in str(reason_not_trusted(path))
            assert not list_bindings(tmp_path, is_trusted=False)
            assert list_bindings(tmp_path, is_trusted=True)  # the package's own
        path.chmod(0o700)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    expected = f"{module} belongs to user {own}, not to user {own + 1}"
    assert reason_not_trusted(module) == expected
    assert not list_bindings(tmp_path, is_trusted=False)


def test_damaged_bindings_are_passed_over(tmp_path):
    module = add_binding(tmp_path, ABI)
    for number, text in enumerate(("", "{}", "no key")):
        other = add_binding(tmp_path, replace(ABI, torch=f"2.{number}"))
        other.with_name("key.json").write_text(text)
    add_binding(tmp_path, replace(ABI, sources="without a module")).unlink()
    assert list_bindings(tmp_path, is_trusted=True) == {ABI: module}


def test_the_lock_lets_one_process_in(tmp_path):
    waited_for: list[int] = []
    order: list[str] = []

    def second() -> None:
        with lock_folder(tmp_path, PATIENCE, waited_for.append):
            order.append("second")

    thread = threading.Thread(target=second)
    with lock_folder(tmp_path, PATIENCE):
        with (
            pytest.raises(TimeoutError, match=f"process {os.getpid()} holds"),
            lock_folder(tmp_path, 0.0),
        ):
            pass
        thread.start()
        until(lambda: waited_for, "the second one does not wait", PATIENCE)
        order.append("first")
    thread.join(PATIENCE)
    assert order == ["first", "second"]
    assert waited_for == [os.getpid()]


def test_the_lock_stays_where_all_bindings_are_removed(tmp_path):
    """Else a build that waits for the lock would get that of a removed file."""
    size = add_binding(tmp_path, ABI).stat().st_size
    with lock_folder(tmp_path, PATIENCE):
        assert empty_folder(tmp_path) > size
        assert os.listdir(tmp_path) == [".lock"]


def test_what_killed_builds_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".build-killed").mkdir()
    (tmp_path / ".build-killed" / "bind.o").write_text("half")
    with lock_folder(tmp_path, PATIENCE):
        assert not (tmp_path / ".build-killed").exists()


def test_a_folder_has_its_name_when_it_is_complete(tmp_path):
    destination = tmp_path / "name"
    for content in ("first", "second"):
        with temporary_folder(tmp_path) as work:
            complete = work / "complete"
            complete.mkdir()
            (complete / "file").write_text(content)
            replace_folder(complete, destination)
        assert (destination / "file").read_text() == content
        assert os.listdir(tmp_path) == ["name"]
    with pytest.raises(RuntimeError), temporary_folder(tmp_path):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_key_is_trusted_with_any_umask(tmp_path, umask):
    made = tmp_path / ABI.name
    made.mkdir(mode=0o700)
    before = os.umask(umask)
    try:
        write_abi(made, ABI)
    finally:
        os.umask(before)
    assert reason_not_trusted(made / "key.json") is None
