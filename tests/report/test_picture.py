"""Pictures: the same shapes as SVG and as PNG."""

import io
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from lockstep.tools.report.picture import Area, Box, Dot, Label, Line, Picture, text_width

SVG = "{http://www.w3.org/2000/svg}"


def opened(picture):
    return Image.open(io.BytesIO(picture.png()))


def test_every_shape_is_in_both_formats():
    picture = Picture(100, 50, "#ffffff", "test")
    picture.add(
        Box(0, 0, 20, 10, "#ff0000"),
        Line([(0, 45), (100, 45)], "#00ff00", 4),
        Area([(40, 0), (60, 0), (60, 20), (40, 20)], "#0000ff"),
        Dot(90, 10, 6, "#ff00ff"),
        Label(30, 35, "<a&b>", 10, "#000000"),
    )
    found = [element.tag.removeprefix(SVG) for element in ElementTree.fromstring(picture.svg())]
    assert found == ["title", "rect", "rect", "polyline", "polygon", "circle", "text"]
    image = opened(picture)
    assert image.size == (200, 100)
    for place, color in {
        (20, 10): (255, 0, 0), (100, 90): (0, 255, 0), (100, 20): (0, 0, 255),
        (180, 20): (255, 0, 255), (2, 60): (255, 255, 255),
    }.items():  # fmt: skip
        assert image.getpixel(place) == color
    text = image.crop((58, 50, 130, 76)).convert("L")
    assert text.getextrema()[0] < 100


def font_size(label):
    picture = Picture(100, 100, "#fff", "")
    picture.add(label)
    return float(ElementTree.fromstring(picture.svg()).find(f"{SVG}text").get("font-size"))


def test_a_text_that_is_too_wide_is_made_smaller():
    size = font_size(Label(0, 0, "w" * 50, 20, "#000", width=100))
    assert size < 20
    assert text_width("w" * 50, size) == pytest.approx(100, rel=0.01)
    assert font_size(Label(0, 0, "w", 20, "#000", width=100)) == 20


@pytest.mark.parametrize("anchor", ["start", "middle", "end"])
def test_bold_letters_do_not_run_into_each_other(anchor):
    """The stroke that makes letters bold needs room between them."""

    def measure(bold):
        picture = Picture(400, 60, "#ffffff", "")
        place = {"start": 50, "middle": 200, "end": 350}[anchor]
        picture.add(Label(place, 45, "illicitly", 36, "#000000", anchor, bold))
        ink = 255 - np.asarray(opened(picture).convert("L"), np.int64)
        columns = np.flatnonzero(ink.sum(axis=0) > 100)
        return columns[-1] - columns[0] + 1 - len(columns), ink.sum()

    (blank, light), (bold_blank, dark) = measure(bold=False), measure(bold=True)
    assert bold_blank > 0.95 * blank
    assert dark > 1.2 * light


def test_text_is_escaped_in_svg():
    picture = Picture(10, 10, "#fff", '<&">')
    picture.add(Label(0, 0, "<script>\x00&\n", 3, "#000"))
    text = ElementTree.fromstring(picture.svg()).find(f"{SVG}text")
    assert text.text == "<script> & "
