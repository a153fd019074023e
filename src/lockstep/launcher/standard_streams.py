"""The standard streams that ranks inherit from their launcher.

Rank 0 inherits the standard input; the standard input of the others is empty. If a new process
of rank 0 begins the script again, it reads an input file from where the first process began.
Input from a terminal or a pipe cannot be read again.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator

__all__ = ["StandardStreams"]


class StandardStreams:
    """The standard streams of this process."""

    def __init__(self) -> None:
        self._begin: int | None = None  # offset in the input file; None before rank 0's start

    @contextlib.contextmanager
    def inherit(self, has_input: bool) -> Iterator[list[int]]:
        """Yield the descriptors of stdin, stdout and stderr for one process.

        Args:
            has_input: Whether the process inherits the standard input.
        """
        with contextlib.ExitStack() as opened:
            null = os.open(os.devnull, os.O_RDWR)
            opened.callback(os.close, null)
            streams = [number if _is_open(number) else null for number in range(3)]
            if not has_input:
                streams[0] = null
            elif stat.S_ISREG(os.fstat(streams[0]).st_mode):
                # To where the first process began; no earlier process reads it now.
                if self._begin is None:
                    self._begin = os.lseek(streams[0], 0, os.SEEK_CUR)
                os.lseek(streams[0], self._begin, os.SEEK_SET)
            yield streams


def _is_open(descriptor: int) -> bool:
    """Return whether a stream is open; if Python found it closed, another file has its number."""
    if (sys.__stdin__, sys.__stdout__, sys.__stderr__)[descriptor] is None:
        return False
    with contextlib.suppress(OSError):
        return bool(os.fstat(descriptor))
    return False
