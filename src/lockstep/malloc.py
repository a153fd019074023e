"""Settings of glibc's malloc: memory that a rank has freed stays in the process.

By default glibc returns large freed blocks to the kernel. A training step frees and
allocates the same activations again and again, and each time the kernel hands out new,
cleared pages. On one processor that takes a quarter of the time of a convolutional network's
step, and the other ranks wait for the slowest one. With these settings the memory of a process
stays at its peak, which the next step needs anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator

__all__ = [
    "keep_freed_memory",
    "release_freed_memory",
    "return_large_blocks",
    "returning_large_blocks",
]

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
TRIM_THRESHOLD = 2**31 - 1  # bytes, the largest value that mallopt accepts
MMAP_THRESHOLDS = (1 << 30, 32 << 20)  # bytes; older versions of glibc accept only the second

LARGE = 1 << 20  # bytes

_is_kept = False  # whether this process keeps freed memory


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory; return whether it does.

    Does nothing without glibc, or if the user has set MALLOC_* variables or GLIBC_TUNABLES.
    """
    global _is_kept
    mallopt = _find_mallopt()
    if mallopt is None:
        return False
    large = any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS)
    _is_kept = bool(mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)) and large
    return _is_kept


def return_large_blocks() -> None:
    """Make malloc return blocks of more than a megabyte as soon as they are freed.

    For a process whose large blocks live for a moment only, such as gathered parameters: small
    tensors that are allocated in their place would keep most of it from being used again.
    """
    global _is_kept
    _is_kept = False
    mallopt = _find_mallopt()
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
    release_freed_memory()


@contextlib.contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Return blocks of more than a megabyte in the body, and keep freed memory again after it."""
    was_kept = _is_kept
    mallopt = _find_mallopt()
    if was_kept and mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        if was_kept:
            keep_freed_memory()


def release_freed_memory() -> None:
    """Return memory that was freed so far to the kernel, as far as glibc can."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _find_mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc; None without glibc, or if the user has made settings."""
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if chosen or not sys.platform.startswith("linux"):
        return None
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return None
    return mallopt
