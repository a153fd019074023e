"""The allocator: a rank that frees and allocates again gets no new pages from the kernel."""

import os
import resource

import pytest
import torch

import lockstep as ls
from lockstep.run.allocator import keep_freed_memory

BLOCK = 8 << 20
TIMES = 50


def pages_handed_out():
    """Return how many pages the kernel handed out while one block was freed again and again."""
    ls.init()
    for _ in range(3):
        torch.zeros(BLOCK, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        # Two blocks at a time, as a network's activations: the heap's end grows and shrinks.
        first, second = (torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(2))
        del first, second
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    ls.shutdown()
    return pages


def has_glibc():
    try:
        return "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, AttributeError):
        return False


@pytest.mark.skipif(not has_glibc(), reason="only glibc has this setting")
def test_freed_memory_is_kept():
    (kept,) = ls.launch(pages_handed_out, nprocs=1)
    block = BLOCK // resource.getpagesize()
    assert kept < TIMES * block / 4  # without the setting every page of both blocks, every time


def test_the_users_own_setting_wins():
    def asked():
        os.environ["MALLOC_ARENA_MAX"] = "2"
        return keep_freed_memory()

    assert ls.launch(asked, nprocs=1) == [False]
