"""Huge pages for a process that is forked many times.

A fork copies the page tables: 12 ms for the 230 MiB that torch and its compiler occupy, half of the
processor time of a rank that does nothing. With huge pages it copies one entry per 2 MiB. A rank
that writes still copies single pages of 4 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path

__all__ = ["collapse_memory"]

MADV_COLLAPSE = 25  # of madvise, since Linux 6.1
HUGE_PAGE = 1 << 21  # bytes
MAPS = Path("/proc/self/maps")
# Private writable mappings without a file: the heap, and what Python's allocator has mapped.
ANONYMOUS = re.compile(r"(\w+)-(\w+) rw-p \w+ 00:00 0 *(?:\[heap\])?")


def collapse_memory() -> None:
    """Move this process's memory into huge pages, where the system has some (Linux 6.1 or later).

    This takes 0.06 to 0.5 s of processor time for 230 MiB. The contents and the amount of memory
    stay the same.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        madvise = ctypes.CDLL(None).madvise
        for line in MAPS.read_text().splitlines():
            if match := ANONYMOUS.fullmatch(line):
                begin, end = (int(address, 16) for address in match.groups())
                first = -(-begin // HUGE_PAGE) * HUGE_PAGE
                for address in range(first, end - HUGE_PAGE + 1, HUGE_PAGE):
                    # It fails for a part that is not in use, and on older kernels.
                    madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)
