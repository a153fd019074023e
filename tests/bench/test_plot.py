"""Plot: every contender."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.kernel.errors import UsageError
from lockstep.tools.bench.interleaved import Contender, Result
from lockstep.tools.bench.plot import check_format, draw
from lockstep.tools.bench.workload import Workload


class Nobody:
    name, library = "nobody", ""


def results(collective="all_reduce", widths=(2,), sizes=(4, 1024, 1 << 20)):
    found = []
    for ranks in widths:
        for size in sizes:
            workload = Workload(collective, size // 4)
            for number, name in enumerate(("lockstep", "gloo", "mpi & co")):
                time = (number + 1) * (1 + size / 1000)
                times = (0.8 * time, time, 1.3 * time)
                found.append(Result(Contender(name, Nobody()), workload, ranks, size, times))
            copy = Contender("memcpy", Nobody(), is_copy=True)
            found.append(Result(copy, workload, ranks, size, (max(size, 1) / 10_000,)))
    return found


def texts(picture):
    root = ElementTree.fromstring(picture.svg())
    return [element.text for element in root.iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize(
    ("widths", "panels"),
    [((2,), ["Time per call", "Bus bandwidth"]),
     ((2, 4), ["Time per call, 2 ranks", "Time per call, 4 ranks"])],
)  # fmt: skip
def test_panels_and_names_are_drawn(widths, panels):
    picture = draw(results(widths=widths), "a machine", "lockstep bench all_reduce")
    said = texts(picture)
    for text in ("all_reduce", "lockstep", "gloo", "mpi & co", "memcpy", *panels, "1 KiB", "1 MiB"):
        assert text in said
    assert "nan" not in picture.svg()


def test_unknown_suffix_raises():
    with pytest.raises(UsageError, match=r"--plot a.pdf: the suffix must be .svg"):
        check_format(Path("a.pdf"))
