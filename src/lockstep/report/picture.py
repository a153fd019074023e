"""Pictures: a few plain shapes, written as SVG or painted as PNG.

A picture is a list of shapes in points, the origin at the top left. The two
writers know the same shapes, so that a slide looks alike in either format.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Area", "Box", "Dot", "Label", "Line", "Picture", "text_width"]

Point = tuple[float, float]
FINE = 2  # pixels a point in a PNG
OVER = 2  # painted this much larger, then scaled down: smooth edges
WIDER = 1.12  # how much wider than Pillow's a viewer's font may be
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
    """A line of text; `y` is its baseline. `width` shrinks a text that would be wider."""

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
    """Shapes on a ground of `width` by `height` points."""

    width: int
    height: int
    ground: str
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Put shapes on top of those already there."""
        self.shapes.extend(shapes)

    def svg(self) -> str:
        """Return the picture as one SVG document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}" role="img">'
            f"<title>{escape(printable(self.title))}</title>"
            f'<rect width="100%" height="100%" fill="{self.ground}"/>'
        )
        return "\n".join([head, *map(element, self.shapes), "</svg>"]) + "\n"

    def png(self) -> bytes:
        """Return the picture as a PNG of twice its size in pixels."""
        scale = FINE * OVER
        image = Image.new("RGB", (self.width * scale, self.height * scale), self.ground)
        brush = ImageDraw.Draw(image)
        for shape in self.shapes:
            paint(brush, shape, scale)
        small = image.resize((self.width * FINE, self.height * FINE), Image.Resampling.LANCZOS)
        small.save(file := io.BytesIO(), "PNG", optimize=True)
        return file.getvalue()


def element(shape: Shape) -> str:
    """Return a shape as an SVG element."""
    match shape:
        case Box(x, y, width, height, fill, corner):
            return (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
                f'height="{height:.1f}" rx="{corner:g}" fill="{fill}"/>'
            )
        case Line(points, stroke, width):
            return (
                f'<polyline points="{listed(points)}" fill="none" stroke="{stroke}" '
                f'stroke-width="{width:g}" stroke-linejoin="round"/>'
            )
        case Area(points, fill):
            return f'<polygon points="{listed(points)}" fill="{fill}"/>'
        case Dot(x, y, radius, fill):
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>'
        case Label():
            return text_element(shape)


def text_element(label: Label) -> str:
    """Return a label as an SVG element, no wider than it may be."""
    weight = ' font-weight="600"' if label.bold else ""
    size = fitting(label)
    return (
        f'<text x="{label.x:.1f}" y="{label.y:.1f}" font-size="{size:g}" fill="{label.fill}" '
        f"text-anchor={quoteattr(label.anchor)}{weight}>{escape(printable(label.text))}</text>"
    )


def listed(points: Sequence[Point]) -> str:
    """Return points as SVG lists them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def paint(brush: ImageDraw.ImageDraw, shape: Shape, scale: int) -> None:
    """Paint a shape, `scale` pixels a point."""
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
            paint_text(brush, shape, scale)


def paint_text(brush: ImageDraw.ImageDraw, label: Label, scale: int) -> None:
    """Paint a label; Pillow's own font has one weight, a thin stroke makes it bold."""
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    size = fitting(label)
    brush.text(
        (label.x * scale, label.y * scale),
        printable(label.text),
        label.fill,
        ImageFont.load_default(size * scale),
        anchor,
        stroke_width=size * scale / 45 if label.bold else 0,
        stroke_fill=label.fill,
    )


def fitting(label: Label) -> float:
    """Return the label's size, smaller where its text would be wider than allowed."""
    if label.width is None:
        return label.size
    return round(
        label.size * min(1.0, label.width / max(text_width(label.text, label.size), 1e-9)), 2
    )


def text_width(text: str, size: float) -> float:
    """Return about how wide `text` is, in points; for an SVG's font, at most that."""
    return WIDER * ImageFont.load_default(100).getlength(printable(text)) * size / 100


def printable(text: str) -> str:
    """Return text without what XML forbids."""
    return "".join(char if char.isprintable() else " " for char in text)
