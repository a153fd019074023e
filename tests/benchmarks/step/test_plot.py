"""The picture: a panel a case, a bar a contender, all of it in the frame."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.step.comparison import Outcome
from benchmarks.step.contenders import Case
from benchmarks.step.plot import COMPUTE, OURS, THEIRS, draw


def outcomes(network="25m", optimizer="sgd"):
    case = Case(network, optimizer, 32)
    steps = {"alone": 0.07, "copies": 0.08, "ddp-gloo": 0.18, "trainer": 0.1}
    found = [Outcome(name, case, 2, [0.9 * t, t, 1.2 * t]) for name, t in steps.items()]
    return [*found, Outcome("fsdp-gloo", case, 2, error="no luck")]


def elements(picture, kind):
    return [
        each for each in ElementTree.fromstring(picture.svg()).iter() if each.tag.endswith(kind)
    ]


def widths(picture, color):
    boxes = [each for each in elements(picture, "}rect") if each.attrib["fill"] == color]
    return [float(box.attrib["width"]) for box in boxes][1:]  # the first is the legend's


def test_bars_are_as_long_as_steps():
    picture = draw(outcomes(), "a machine", "python -m benchmarks.step")
    alone, copies, gloo, trainer = widths(picture, COMPUTE)
    assert abs(copies - gloo) < 0.1
    assert abs(copies - trainer) < 0.1
    assert abs(alone / copies - 7 / 8) < 0.01
    assert abs(widths(picture, OURS)[0] / copies - 2 / 8) < 0.01
    assert abs(widths(picture, THEIRS)[0] / copies - 10 / 8) < 0.01


def test_every_case_has_a_panel_within_the_frame():
    cases = [("1m", "sgd"), ("25m", "sgd"), ("25m", "adamw")]
    picture = draw([each for case in cases for each in outcomes(*case)], "m", "c")
    said = [each.text for each in elements(picture, "}text")]
    for text in ("1m, sgd, 2 ranks", "25m, adamw, 2 ranks", "ddp-gloo", "180.0 ms", "error"):
        assert text in said
    for box in elements(picture, "}rect")[1:]:
        x, y = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 <= x <= x + float(box.attrib["width"]) <= picture.width
        assert 0 <= y <= picture.height - 40
