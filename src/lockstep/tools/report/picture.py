"""Pictures of simple shapes, as SVG or, drawn with Pillow, as PNG.

Coordinates are in points, with the origin at the top left. Both formats support the same
shapes, so a plot looks the same in either of them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape, quoteattr

if TYPE_CHECKING:
    from PIL import ImageDraw

__all__ = ["Area", "Box", "Dot", "Label", "Line", "Picture", "text_width"]

Point = tuple[float, float]
PIXELS_PER_POINT = 2  # in a PNG
OVERSAMPLING = 2  # drawn larger and scaled down, for smooth edges
FONT_MARGIN = 1.12  # a viewer's font may be this much wider than Pillow's
BOLD_STROKE, BOLD_SPACING = 0.02, 0.04  # fractions of the size of a bold label
FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Box:
    """A filled rectangle, with round corners of radius `corner`."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    corner: float = 0.0


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[Point]
    stroke: str
    width: float = 1.5


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: Sequence[Point]
    fill: str


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    fill: str


@dataclass(frozen=True)
class Label:
    """A line of text with the baseline at `y`, shrunk if it would be wider than `width`."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    width: float | None = None


Shape = Box | Line | Area | Dot | Label


@dataclass
class Picture:
    """Shapes on a background of `width` by `height` points."""

    width: int
    height: int
    background: str
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Add shapes on top of the existing ones."""
        self.shapes.extend(shapes)

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">'
            f"<title>{escape(_printable(self.title))}</title>"
            f'<rect width="100%" height="100%" fill="{self.background}"/>'
        )
        return "\n".join([head, *map(_svg_element, self.shapes), "</svg>"]) + "\n"

    def png(self) -> bytes:
        """Return the picture as a PNG with two pixels per point."""
        from PIL import Image, ImageDraw

        scale = PIXELS_PER_POINT * OVERSAMPLING
        image = Image.new("RGB", (self.width * scale, self.height * scale), self.background)
        brush = ImageDraw.Draw(image)
        for shape in self.shapes:
            _paint(brush, shape, scale)
        small = image.resize(
            (self.width * PIXELS_PER_POINT, self.height * PIXELS_PER_POINT),
            Image.Resampling.LANCZOS,
        )
        small.save(file := io.BytesIO(), "PNG", optimize=True)
        return file.getvalue()


def _svg_element(shape: Shape) -> str:
    """Return a shape as an SVG element."""
    match shape:
        case Box(x, y, width, height, fill, corner):
            return (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
                f'height="{height:.1f}" rx="{corner:g}" fill="{fill}"/>'
            )
        case Line(points, stroke, width):
            return (
                f'<polyline points="{_svg_points(points)}" fill="none" stroke="{stroke}" '
                f'stroke-width="{width:g}" stroke-linejoin="round"/>'
            )
        case Area(points, fill):
            return f'<polygon points="{_svg_points(points)}" fill="{fill}"/>'
        case Dot(x, y, radius, fill):
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>'
        case Label():
            return _svg_text(shape)


def _svg_text(label: Label) -> str:
    """Return a label as an SVG element."""
    weight = ' font-weight="600"' if label.bold else ""
    size = _fitting_size(label)
    return (
        f'<text x="{label.x:.1f}" y="{label.y:.1f}" font-size="{size:g}" fill="{label.fill}" '
        f"text-anchor={quoteattr(label.anchor)}{weight}>{escape(_printable(label.text))}</text>"
    )


def _svg_points(points: Sequence[Point]) -> str:
    """Return points in the format of SVG."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _paint(brush: ImageDraw.ImageDraw, shape: Shape, scale: int) -> None:
    """Paint a shape with `scale` pixels per point."""
    match shape:
        case Box(x, y, width, height, fill, corner):
            corners = (x * scale, y * scale, (x + max(width, 0)) * scale, (y + height) * scale)
            brush.rounded_rectangle(corners, corner * scale, fill)
        case Line(points, stroke, width):
            scaled = [(x * scale, y * scale) for x, y in points]
            brush.line(scaled, stroke, max(1, int(width * scale)), "curve")
        case Area(points, fill):
            brush.polygon([(x * scale, y * scale) for x, y in points], fill)
        case Dot(x, y, radius, fill):
            brush.circle((x * scale, y * scale), radius * scale, fill)
        case Label():
            _paint_text(brush, shape, scale)


def _paint_text(brush: ImageDraw.ImageDraw, label: Label, scale: int) -> None:
    """Paint a label; Pillow's font has a single weight, so bold letters get a thin stroke.

    Strokes make letters wider, so bold letters are set one by one with more space between them.
    """
    from PIL import ImageFont

    size = _fitting_size(label) * scale
    font, text = ImageFont.load_default(size), _printable(label.text)
    if not label.bold:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
        brush.text((label.x * scale, label.y * scale), text, label.fill, font, anchor)
        return
    width = font.getlength(text) + BOLD_SPACING * size * (len(text) - 1)
    left = label.x * scale - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[label.anchor]
    for at, letter in enumerate(text):
        kerned = font.getlength(text[: at + 1]) - font.getlength(letter)
        corner = (left + kerned + BOLD_SPACING * size * at, label.y * scale)
        stroke = BOLD_STROKE * size
        brush.text(corner, letter, label.fill, font, "ls", stroke_width=stroke)


def _fitting_size(label: Label) -> float:
    """Return the size of a label's font, reduced if the text would be too wide."""
    if label.width is None:
        return label.size
    return round(
        label.size * min(1.0, label.width / max(text_width(label.text, label.size), 1e-9)), 2
    )


def text_width(text: str, size: float) -> float:
    """Return an estimate of the width of `text` in points, an upper bound for most fonts."""
    from PIL import ImageFont

    return FONT_MARGIN * ImageFont.load_default(100).getlength(_printable(text)) * size / 100


def _printable(text: str) -> str:
    """Return text without the characters that XML does not allow."""
    return "".join(char if char.isprintable() else " " for char in text)
