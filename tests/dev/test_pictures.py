"""Pictures of terminals: small, shown with a text, and without anything of a machine."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from dev.pictures import FILES, FOLDER, LARGEST, ROOT, find_private


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
