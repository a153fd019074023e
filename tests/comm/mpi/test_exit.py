"""A rank under mpiexec that ends the others."""

from __future__ import annotations

import fcntl
import os
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from lockstep.comm.mpi import exit as module


def unread(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.parametrize("is_read", [True, False])
def test_what_a_rank_prints_is_read_before_it_aborts(is_read, monkeypatch):
    """mpiexec drops what it has not read when a rank aborts: an error without its traceback."""
    read, write = os.pipe()
    texts, left = [], []
    with os.fdopen(read, "rb", 0) as reader, os.fdopen(write, "w") as stream:

        def sleep(seconds):
            if is_read:  # mpiexec reads as soon as this rank waits for it
                texts.append(reader.read(10_000))

        abort = SimpleNamespace(Get_size=lambda: 2, Abort=lambda status: left.append(unread(write)))
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(module, "READ_TIMEOUT", 60.0 if is_read else 0.01)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        module._abort(SimpleNamespace(COMM_WORLD=abort), "rank 1 of 2 raised ValueError")
        monkeypatch.undo()
    if is_read:
        assert left == [0]
        assert b"rank 1 of 2 raised ValueError" in b"".join(texts)
    else:
        assert left[0] > 0  # nobody reads: the others are ended all the same
