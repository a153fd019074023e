"""The key: from a file, from the environment, or new."""

from __future__ import annotations

import pytest

from lockstep.comm.transport.secret import KEY_VARIABLE, make_key, read_key
from lockstep.kernel.errors import UsageError


def test_a_key_is_new_each_time():
    assert make_key(None) != make_key(None)
    assert len(make_key(None)) == 32


def test_the_driver_makes_the_file_that_the_worker_reads(tmp_path):
    path = tmp_path / "driver.key"
    key = make_key(path)
    assert read_key(path) == key == make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_driver_and_worker_read_the_key_from_the_environment(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    assert make_key(None) == read_key(None) == b"\xab" * 32


def test_without_a_key_the_error_says_where_to_get_one(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"--key-file, or set {KEY_VARIABLE}"):
        read_key(None)


def test_a_variable_without_a_key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "x")
    for read in (make_key, read_key):
        with pytest.raises(UsageError, match="contains no driver key"):
            read(None)
