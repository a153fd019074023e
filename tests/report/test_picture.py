"""Pictures: the same shapes as SVG and as PNG."""

import io
from xml.etree import ElementTree

from PIL import Image

from lockstep.tools.report.picture import Area, Box, Dot, Label, Line, Picture

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


def test_text_is_escaped_in_svg():
    picture = Picture(10, 10, "#fff", '<&">')
    picture.add(Label(0, 0, "<script>\x00&\n", 3, "#000"))
    text = ElementTree.fromstring(picture.svg()).find(f"{SVG}text")
    assert text.text == "<script> & "
