"""The standard streams that ranks inherit."""

import os
from contextlib import contextmanager

import pytest

from lockstep.launcher.rank_processes import StandardStreams


@contextmanager
def as_input(descriptor):
    """Make a descriptor the standard input of this process."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


def read(streams: StandardStreams, has_input: bool = True) -> bytes:
    with streams.inherit(has_input) as (stdin, *outputs):
        assert outputs == [1, 2]
        return os.read(stdin, 100)


@pytest.fixture
def streams():
    return StandardStreams()


def test_a_file_is_read_again_from_where_the_first_process_began(streams, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"header body")
    with path.open("rb", buffering=0) as file, as_input(file.fileno()):
        assert file.read(7) == b"header "  # by the launcher itself
        assert read(streams, has_input=False) == b""
        assert read(streams) == b"body"
        assert read(streams) == b"body"


def test_what_was_read_from_a_pipe_is_gone(streams):
    reading, writing = os.pipe()
    with os.fdopen(reading), as_input(reading):
        os.write(writing, b"first")
        assert read(streams) == b"first"
        os.close(writing)
        assert read(streams) == b""
