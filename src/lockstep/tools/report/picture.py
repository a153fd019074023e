"""Pictures of simple shapes, as SVG.

Coordinates are in points, with the origin at the top left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

__all__ = ["Area", "Box", "Dot", "Label", "Line", "Picture", "text_width"]

Point = tuple[float, float]
FONT_MARGIN = 1.12  # a viewer's font may be this much wider than Pillow's
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
    opacity: float = 1.0


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
        case Area(points, fill, opacity):
            style = f'fill="{fill}"' + (f' fill-opacity="{opacity:g}"' if opacity < 1 else "")
            return f'<polygon points="{_svg_points(points)}" {style}/>'
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
