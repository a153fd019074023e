"""Drawings: the committed ones are what the program draws, and fit on a phone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from dev.drawings.__main__ import FOLDER, ROOT, draw_all
from dev.drawings.packages import ROWS
from lockstep.tools.report.picture import Label, text_width
from test_layers import LEVEL

PICTURES = draw_all()
SMALLEST = 10  # points; a page on a phone is about as wide as a card, so that this is 9 pixels


@pytest.mark.parametrize("name", PICTURES)
def test_committed_drawing_is_what_the_program_draws(name):
    assert (FOLDER / name).read_text() == PICTURES[name].svg(), "run `make drawings`"


@pytest.mark.parametrize("name", PICTURES)
def test_text_is_legible_and_inside_the_card(name):
    picture = PICTURES[name]
    for label in (shape for shape in picture.shapes if isinstance(shape, Label)):
        width = text_width(label.text, label.size)
        left = label.x - width * {"start": 0, "middle": 0.5, "end": 1}[label.anchor]
        assert label.size >= SMALLEST, label
        assert left >= 8, label
        assert left + width <= picture.width - 4, label
        assert 8 <= label.y <= picture.height - 4, label


def test_packages_are_drawn_above_those_that_they_import():
    folders = {path.parent.name for path in (ROOT / "src/lockstep").glob("*/__init__.py")}
    folders |= {f"tools.{path.parent.name}" for path in (ROOT / "src").glob("*/tools/*/*.py")}
    rows = [[LEVEL[name] for name in row] for row in ROWS]
    assert {name for row in ROWS for name in row} == folders - {"tools", "tools.tools"}
    assert all(min(above) > max(below) for above, below in pairwise(rows))


def test_every_drawing_is_shown_on_a_page_with_a_description():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]*)\]\([^)]*pictures/([^)]+)\)", pages))
    described = {name: text for text, name in shown.items()}
    assert described.keys() >= PICTURES.keys()
    assert all(len(described[name]) > 40 for name in PICTURES)
