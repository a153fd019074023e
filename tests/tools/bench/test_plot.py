"""Plot: every contender."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lockstep.tools.bench.plot import draw
from lockstep.tools.bench.results import Measurement


def results(widths=(2,), sizes=(4, 1024, 1 << 20)):
    found = []
    for ranks in widths:
        for size in sizes:
            for number, name in enumerate(("lockstep", "gloo", "mpi & co")):
                time = (number + 1) * (1 + size / 1000)
                times = [0.8 * time, time, 1.3 * time]
                found.append(Measurement(name, "", "all_reduce", ranks, size, size // 4, times))
    return [*found, Measurement("none", "", "all_reduce", 2, 4, 1, [], error="unable")]


def texts(picture):
    root = ElementTree.fromstring(picture.svg())
    return [element.text for element in root.iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize(
    ("widths", "panels"),
    [((2,), ["Time per call, 2 ranks", "Bus bandwidth"]),
     ((2, 4), ["Time per call, 2 ranks", "Time per call, 4 ranks"])],
)  # fmt: skip
def test_panels_and_names_are_drawn(widths, panels):
    picture = draw(results(widths), "a machine", "lockstep bench all_reduce")
    said = texts(picture)
    for text in ("all_reduce", "lockstep", "gloo", "mpi & co", *panels, "1 KiB", "1 MiB"):
        assert text in said
    assert "nan" not in picture.svg()
