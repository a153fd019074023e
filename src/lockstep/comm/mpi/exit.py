"""How a rank under mpiexec ends: with the others, or ending them.

MPI_Finalize waits for the other ranks, which may wait for this one. A rank that fails therefore
calls MPI_Abort, with which mpiexec ends all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
from typing import Any, TextIO

from lockstep.comm.mpi.exited_ranks import exited_ranks
from lockstep.comm.mpi.work import progress, unfinished
from lockstep.messages import say

__all__ = ["end_together"]

PATIENCE = 1.0  # seconds for operations that are in progress at exit
READ_TIMEOUT = 1.0  # seconds for mpiexec to read what a rank printed before it aborts

_process: int | None = None


def end_together(mpi: Any) -> None:
    """Let this rank end the others if it fails; may be called repeatedly."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_leave, mpi)


def _leave(mpi: Any) -> None:
    """End the thread, and all ranks if this one has failed. Called at exit, before MPI_Finalize."""
    if _process != os.getpid() or mpi.Is_finalized():
        return
    world = mpi.COMM_WORLD
    who = f"rank {world.Get_rank()} of {world.Get_size()}"
    pending = progress.stop()
    exited_ranks.announce(world.Get_rank())
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is not None:
        _abort(mpi, f"{who} raised {type(error).__name__} and ends the other ranks (MPI_Abort)")
    deadline = time.monotonic() + PATIENCE
    while unfinished() or not all([work.advance() for work in pending]):
        if time.monotonic() > deadline:
            _abort(
                mpi,
                f"{who} ends with operations in progress that no other rank has completed, and "
                "ends the other ranks (MPI_Abort)",
            )
        time.sleep(0.001)


def _abort(mpi: Any, sentence: str) -> None:
    if mpi.COMM_WORLD.Get_size() == 1:
        return
    say(sentence)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        _wait_until_read(stream)
    mpi.COMM_WORLD.Abort(1)


def _wait_until_read(stream: TextIO) -> None:
    """Wait until mpiexec has read what was written: it drops the rest when a rank aborts."""
    deadline = time.monotonic() + READ_TIMEOUT
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or a closed one
        descriptor = stream.fileno()
        while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < deadline:
            unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
            if not int.from_bytes(unread, sys.byteorder):
                return
            time.sleep(0.001)  # no event tells that a pipe was read
