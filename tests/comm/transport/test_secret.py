"""Files of secrets."""

from __future__ import annotations

import os

import pytest

from lockstep.comm.transport.secret import create_secret_file, read_secret_file
from lockstep.kernel.errors import FileError, UsageError


def test_a_new_file_is_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "run.secret"
    before = os.umask(0)
    try:
        secret = create_secret_file(path, "secret")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(secret) == 32
    assert read_secret_file(path, "secret") == secret == create_secret_file(path, "secret")


def test_a_file_that_others_can_read_is_an_error(tmp_path):
    path = tmp_path / "run.secret"
    create_secret_file(path, "secret")
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"other users can read this secret: run chmod 600 /"):
        read_secret_file(path, "secret")


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileError, match="the secret cannot be written"):
        create_secret_file(tmp_path / "nowhere" / "run.secret", "secret")


@pytest.mark.parametrize("content", [b"", b"a password", b"ab" * 31, b"\xff" * 64, b"ab" * 9999])
def test_a_file_without_a_secret(tmp_path, content):
    path = tmp_path / "run.secret"
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises((UsageError, FileError), match=r"contains no secret|it is not text"):
        read_secret_file(path, "secret")
