"""Pictures of terminals: drawn in place, small, and without anything of a machine."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.pictures import FILES, FOLDER, LARGEST, ROOT, Cell, find_private, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def cells(text, **style):
    return [Cell(letter, **style) for letter in text]


def test_text_is_drawn_where_it_is_on_the_terminal_in_its_style():
    rows = [cells("a < b   c"), cells("  "), [*cells("ok", color="#8fd694", is_bold=True)]]
    root = ElementTree.fromstring(to_svg(rows, 'a "title" & more'))
    assert root.find(f"{SVG}title").text == 'a "title" & more'
    first, second, third = root.iter(f"{SVG}text")
    assert (first.text, second.text, third.text) == ("a < b", "c", "ok")
    step = (float(second.get("x")) - float(first.get("x"))) / 8
    assert float(first.get("textLength")) == pytest.approx(5 * step)
    assert float(third.get("y")) - float(first.get("y")) == 2 * 19
    assert (third.get("fill"), third.get("font-weight")) == ("#8fd694", "bold")
    assert first.get("fill") is None


def test_names_of_the_machine_are_found_as_words():
    assert find_private("host: vm, up", ["vm"]) == "vm"
    assert find_private("at /home/jane/x", ["/home"]) == "/home"
    assert find_private("vmware", ["vm"]) is None


@pytest.mark.parametrize("name", FILES)
def test_a_picture_is_small_and_shown_with_a_text(name):
    path = FOLDER / name
    assert path.stat().st_size <= LARGEST
    if path.suffix == ".svg":
        ElementTree.fromstring(path.read_text())
        assert find_private(path.read_text(), ["/root", "/home", "/work", "/tmp"]) is None
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = [
        alt
        for page in pages
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", page.read_text())
        if target.endswith(f"pictures/{path.name}")
    ]
    assert shown
    assert all(len(alt) > 20 for alt in shown)
