"""Pictures: shapes as SVG."""

from xml.etree import ElementTree

from lockstep.tools.report.picture import Area, Box, Dot, Label, Line, Picture

SVG = "{http://www.w3.org/2000/svg}"


def test_every_shape_is_an_element_and_text_is_escaped():
    picture = Picture(100, 50, "#ffffff", '<&">')
    picture.add(
        Box(0, 0, 20, 10, "#ff0000"),
        Line([(0, 45), (100, 45)], "#00ff00", 4),
        Area([(40, 0), (60, 0), (60, 20), (40, 20)], "#0000ff"),
        Dot(90, 10, 6, "#ff00ff"),
        Label(30, 35, "<script>\x00&\n", 10, "#000000"),
    )
    elements = list(ElementTree.fromstring(picture.svg()))
    names = [element.tag.removeprefix(SVG) for element in elements]
    assert names == ["title", "rect", "rect", "polyline", "polygon", "circle", "text"]
    assert elements[-1].text == "<script> & "
