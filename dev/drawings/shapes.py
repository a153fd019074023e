"""The parts that all drawings share: a card, its colors, cells of data, arrows, lanes of time.

A card is 400 points wide, about the width of a phone, so that its text is legible there; a page
with more room shows it larger. It has its own background, because an image does not change its
colors when a reader switches the page to dark colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from lockstep.tools.report.picture import Area, Box, Label, Line, Picture

__all__ = [
    "EDGE", "HEAVY", "INK", "LEFT", "MUTED", "PAPER", "RANKS", "RIGHT", "SOFT", "SUM", "WASH",
    "WIDTH", "Card",
]  # fmt: skip

WIDTH = 400
ENLARGED = 1.25
LEFT = 16
RIGHT = WIDTH - 16
INK = "#16202e"
SOFT = "#4c5868"
MUTED = "#7c8796"
EDGE = "#cdd5df"
WASH = "#e3e8ef"
PAPER = "#f5f7fa"
WHITE = "#ffffff"
RANKS = ("#0b6bb8", "#b8500a", "#14825a", "#8347ad")
"""The color of each rank, and of the values that come from it."""
SUM = "#303c52"
"""The color of values that come from several ranks."""
HEAVY = 2.0
BASELINE = 0.36  # distance from the middle of a text to its baseline, as a share of its size


class Card(Picture):
    """An empty card; `title` is its text for screen readers."""

    def __init__(self, height: int, title: str) -> None:
        super().__init__(WIDTH, height, "none", title)
        self.add(
            Box(0, 0, WIDTH, height, EDGE, 10),
            Box(1, 1, WIDTH - 2, height - 2, PAPER, 9),
        )

    def svg(self) -> str:
        """Return the card as an SVG document that a page shows at `ENLARGED` times its size."""
        size = f'width="{self.width}" height="{self.height}"'
        larger = f'width="{self.width * ENLARGED:g}" height="{self.height * ENLARGED:g}"'
        svg = super().svg()
        assert svg.count(size) == 1
        return svg.replace(size, larger, 1)

    def add_text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        fill: str = INK,
        anchor: Literal["start", "middle", "end"] = "start",
        bold: bool = False,
    ) -> None:
        """Add a line of text whose middle is at `y`."""
        self.add(Label(x, y + size * BASELINE, text, size, fill, anchor, bold))

    def add_lines(
        self, x: float, y: float, lines: Iterable[str], size: float = 12, fill: str = SOFT
    ) -> None:
        """Add lines of text below each other; the middle of the first is at `y`."""
        for number, line in enumerate(lines):
            self.add_text(x, y + number * size * 1.35, line, size, fill)

    def add_cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        fill: str = RANKS[0],
        ink: str = WHITE,
        size: float = 12,
        corner: float = 3,
    ) -> None:
        """Add a filled box with a text in its middle."""
        self.add(Box(x, y, width, height, fill, corner))
        if text:
            self.add_text(x + width / 2, y + height / 2, text, size, ink, "middle")

    def add_arrow(
        self,
        begin: tuple[float, float],
        end: tuple[float, float],
        color: str = MUTED,
        width: float = 1.5,
    ) -> None:
        """Add a straight arrow."""
        x0, y0 = begin
        x1, y1 = end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx = (x1 - x0) / length
        dy = (y1 - y0) / length
        self.add(Line([begin, (x1 - 5 * dx, y1 - 5 * dy)], color, width))
        self.add_head(end, (dx, dy), color)

    def add_head(
        self,
        tip: tuple[float, float],
        direction: tuple[float, float] = (1, 0),
        color: str = MUTED,
    ) -> None:
        """Add the head of an arrow."""
        x, y = tip
        dx, dy = direction
        base = (x - 7 * dx, y - 7 * dy)
        corners = [(base[0] - 4 * dy, base[1] + 4 * dx), (base[0] + 4 * dy, base[1] - 4 * dx)]
        self.add(Area([tip, *corners], color))

    def add_lane(
        self,
        y: float,
        height: float,
        name: str,
        spans: Sequence[tuple[float, float, str, str, str]],
        left: float = 70,
    ) -> None:
        """Add a lane of time: its name, and its spans (begin, end, text, fill, ink) in points."""
        self.add_text(LEFT, y + height / 2, name, 12, SOFT)
        self.add(Box(left, y, RIGHT - left, height, WASH, 3))
        for begin, end, text, fill, ink in spans:
            self.add_cell(begin, y, end - begin - 1, height, text, fill, ink, 11)
