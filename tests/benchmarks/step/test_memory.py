"""Memory: what a process holds, and what several share counted once."""

from __future__ import annotations

import mmap
import os
import time

from benchmarks.step.memory import Watch, proportional

SIZE = 48 << 20


def test_memory_that_is_held_for_a_while_is_seen():
    with Watch([os.getpid()]) as watch:
        first = proportional(os.getpid())
        held = mmap.mmap(-1, SIZE)  # malloc may have kept as much of an earlier test
        held.write(b"x" * SIZE)
        deadline = time.monotonic() + 60
        while watch.host < first + SIZE * 3 // 4:
            assert time.monotonic() < deadline
        held.close()
    assert watch.rank == watch.host
    assert watch.rank > first + SIZE // 2


def test_what_two_processes_share_counts_once():
    shared = mmap.mmap(-1, SIZE)
    ready, done = os.pipe(), os.pipe()
    before = proportional(os.getpid())
    shared.write(b"x" * SIZE)
    alone = proportional(os.getpid())
    child = os.fork()
    if child == 0:
        assert len(shared[:]) == SIZE
        os.write(ready[1], b"!")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    together = proportional(os.getpid())
    os.write(done[1], b"!")
    assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *done):
        os.close(end)
    shared.close()
    assert alone - before > 0.9 * SIZE
    assert alone - together > 0.4 * SIZE


def test_a_process_that_is_gone_holds_nothing():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert proportional(child) == 0
