"""The allocator: memory that a rank has freed stays with it, to be used again.

By default glibc gives large blocks back to the kernel when they are freed. A
training step frees and allocates the same activations again and again, and each
time the kernel hands out pages anew, cleared: a quarter of the time of a
convolutional network's step on one processor, and other ranks wait for the one
that has it worst. Kept, the memory of a process stays at its peak, which the
next step needs anyway.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT = 2**31 - 1  # bytes at the end of the heap, the largest value that mallopt takes
FROM_HEAP = (1 << 30, 32 << 20)  # bytes of a block; older versions of glibc take the second only


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed; return whether it did.

    Does nothing outside glibc, and where the user's own MALLOC_* or GLIBC_TUNABLES
    variables say how to allocate.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    large = any(mallopt(M_MMAP_THRESHOLD, size) for size in FROM_HEAP)
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT)) and large
