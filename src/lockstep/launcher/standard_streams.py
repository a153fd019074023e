"""The standard streams that ranks inherit from their launcher.

Rank 0 inherits the standard input; that of the others is empty. The process of a later rank 0
that begins the script again reads a file again, from where the first one has. What was read from
a terminal or a pipe is gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

__all__ = ["StandardStreams"]


class StandardStreams:
    """The standard streams of this process."""

    def __init__(self) -> None:
        self._begin: int | None = None  # of the input's file; None until a rank has inherited it

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
                self._rewind(streams[0])
            yield streams

    def _rewind(self, descriptor: int) -> None:
        """Set the input's file to where the first process began; those before this are gone."""
        if self._begin is None:
            self._begin = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, self._begin, os.SEEK_SET)


def _is_open(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(descriptor))
    return False
