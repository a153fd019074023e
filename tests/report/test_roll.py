"""The roll: timelines as a picture that a viewer opens."""

import xml.etree.ElementTree as ET

from lockstep.record.timeline import Timeline, Work
from lockstep.report.roll import PAPER, roll

SVG = "{http://www.w3.org/2000/svg}"
WORKS = (
    Work(0, "forward", 0, 4, 0, 7),
    Work(0, "backward", 4, 8, 2, 7),
    Work(1, "forward", 0, 0.001, 1, 7),
    Work(1, "zap", 1, 2),
)


def test_every_piece_of_work_is_drawn_to_scale():
    picture = roll([Timeline("one <&>", 2, WORKS), Timeline("two", 2, WORKS[:2])], "both")
    root = ET.fromstring(picture.svg())
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("rank 1") == 2
    assert texts.count("7") == 4  # not on the piece that is too narrow for it
    assert {"one <&>", "two", "forward", "backward"} <= set(texts)
    widths = [float(r.get("width")) for r in root.iter(f"{SVG}rect") if r.get("fill") == "#0b6bb8"]
    assert sorted(widths)[-2:] == [widths[0]] * 2


def test_stages_of_one_rank_have_shades():
    fills = [shape.fill for shape in roll([Timeline("one", 2, WORKS)], "").shapes]
    assert "#3f9f7c" in fills
    assert PAPER in fills


def test_nothing_is_drawn_as_nothing():
    assert roll([Timeline("none", 1, ())], "none").svg().startswith("<svg")
