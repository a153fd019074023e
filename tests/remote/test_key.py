"""The key: from a file, from the environment, or new."""

from __future__ import annotations

import pytest

from lockstep.errors import FileError, UsageError
from lockstep.remote.key import VARIABLE, find_key, make_key


def test_a_key_is_new_each_time():
    assert make_key(None) != make_key(None)
    assert len(make_key(None)) == 32


def test_the_driver_makes_the_file_that_the_worker_reads(tmp_path):
    path = tmp_path / "driver.key"
    key = make_key(path)
    assert find_key(path) == key == make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_both_take_it_from_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ab" * 32)
    assert make_key(None) == find_key(None) == b"\xab" * 32


def test_a_worker_without_a_key_is_told_where_to_get_one(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"--key-file, or set {VARIABLE}"):
        find_key(None)


def test_a_key_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "driver.key"
    make_key(path)
    path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        find_key(path)


def test_what_is_no_key_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "driver.key"
    path.touch(0o600)
    path.write_text("a password\n")
    with pytest.raises(UsageError, match="holds no key"):
        find_key(path)
    with pytest.raises(FileError, match="cannot be read"):
        find_key(tmp_path / "nowhere")
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(UsageError, match="holds no key"):
        make_key(None)
