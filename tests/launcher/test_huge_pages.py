"""Memory in huge pages: the same contents, in fewer entries of the page tables."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from lockstep.launcher import huge_pages
from lockstep.launcher.huge_pages import HUGE_PAGE, MADV_COLLAPSE, collapse_memory

SIZE = 8 * HUGE_PAGE


def read_huge_pages() -> int:
    """Return how much memory of this process is in huge pages, in bytes."""
    smaps = Path("/proc/self/smaps").read_text()
    return sum(int(size) << 10 for size in re.findall(r"AnonHugePages: +(\d+) kB", smaps))


@pytest.fixture
def memory():
    """Memory that may lie in huge pages; skip where the system has none."""
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        found[:] = bytes(range(256)) * (SIZE // 256)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(found))
        first = -(-begin // HUGE_PAGE) * HUGE_PAGE
        madvise = ctypes.CDLL(None).madvise
        if madvise(ctypes.c_void_p(first), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE):
            pytest.skip("this system has no huge pages")
        yield begin, found


def test_memory_keeps_its_contents(memory, monkeypatch, tmp_path):
    begin, content = memory
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [each for each in maps if is_in(begin, each)]
    monkeypatch.setattr(huge_pages, "MAPS", tmp_path / "maps")
    (tmp_path / "maps").write_text(f"{line}\nno mapping\n")
    before = read_huge_pages()
    collapse_memory()
    assert read_huge_pages() >= before + SIZE - 3 * HUGE_PAGE
    assert content[:] == bytes(range(256)) * (SIZE // 256)


def is_in(address: int, line: str) -> bool:
    begin, end = (int(each, 16) for each in line.split()[0].split("-"))
    return begin <= address < end
