"""The picture of whole steps: a panel a case, a bar a contender.

ddp-gloo    ████████ ▒▒▒▒▒▒▒▒▒▒▒├──┤     what computing costs, what comes beyond it;
trainer     ████████ ▒▒├┤                 from a tenth to nine tenths of the steps
"""

from __future__ import annotations

from benchmarks.step.comparison import ALONE, Outcome
from benchmarks.step.table import STOCK, baseline, beyond, milliseconds, named
from lockstep.tools.report.picture import Box, Label, Line, Picture, text_width

__all__ = ["draw"]

WIDTH = 1200
MARGIN = 56
GAP = 48
TOP = 150
ROW = 24
HEAD = 44
FOOT = 44
NAME = 118  # points left and right of the bars
VALUE = 96
INK = "#16202e"
SOFT = "#5a6675"
FAINT = "#e4e8ee"
PAPER = "#ffffff"
COMPUTE = "#aab4c0"
OURS = "#0b6bb8"
THEIRS = "#d1570c"
STOCK_COLOUR = "#8a5a00"
THEIR = ("ddp-gloo", "fsdp-gloo")


def draw(outcomes: list[Outcome], machine: str, command: str) -> Picture:
    """Return the picture of all cases, two beside each other."""
    cases = list(dict.fromkeys((each.case, each.ranks) for each in outcomes))
    groups = [[each for each in outcomes if (each.case, each.ranks) == case] for case in cases]
    columns = min(2, len(groups))
    tall = HEAD + ROW * max(map(len, groups)) + FOOT
    rows = -(-len(groups) // columns)
    picture = Picture(WIDTH, round(TOP + rows * tall + 40), PAPER, "training steps")
    room = WIDTH - 2 * MARGIN
    picture.add(
        Label(MARGIN, 66, "A training step", 34, INK, bold=True),
        Label(MARGIN, 96, machine, 17, SOFT, width=room),
        Label(MARGIN, picture.height - 20, command, 12, SOFT, width=room - 150),
        Label(WIDTH - MARGIN, picture.height - 20, "lockstep bench", 12, SOFT, "end"),
    )
    legend(picture, 126)
    each = (room - GAP * (columns - 1)) / columns
    for number, group in enumerate(groups):
        x = MARGIN + (number % columns) * (each + GAP)
        panel(picture, group, x, TOP + (number // columns) * tall, each)
    return picture


def legend(picture: Picture, y: float) -> None:
    """Say what the colors are."""
    entries = (
        (COMPUTE, "as copies that exchange nothing"), (OURS, "beyond, on lockstep"),
        (THEIRS, "beyond, on gloo"), (STOCK_COLOUR, "beyond, freed memory not kept"),
    )  # fmt: skip
    at = float(MARGIN)
    for color, text in entries:
        picture.add(Box(at, y - 11, 14, 12, color), Label(at + 20, y, text, 14, INK))
        at += text_width(text, 14) + 48


def panel(picture: Picture, group: list[Outcome], x: float, y: float, width: float) -> None:
    """Draw one case into a column at (x, y)."""
    case = group[0].case
    done = [each for each in group if each.times]
    title = f"{case.network}, {case.optimizer}, {group[0].ranks} ranks"
    picture.add(Label(x, y + 20, title, 17, INK, bold=True))
    picture.add(Line([(x, y + 30), (x + width, y + 30)], FAINT, 1))
    longest = max((each.quantile(0.9) for each in done), default=1.0)
    scale = (width - NAME - VALUE) / longest
    for number, outcome in enumerate(group):
        bar(picture, outcome, group, x, y + HEAD + number * ROW, scale)


def bar(
    picture: Picture, outcome: Outcome, group: list[Outcome], x: float, y: float, scale: float
) -> None:
    """Draw one contender's bar, its spread and its time."""
    picture.add(Label(x, y + 12, outcome.name, 13, INK))
    left = x + NAME
    middle = y + 8
    if not outcome.times:
        picture.add(Label(left, y + 12, "error", 12, SOFT))
        return
    copies = named(baseline(outcome), group)
    more = beyond(outcome, group)
    compute = min(copies.median, outcome.median) if copies and more is not None else outcome.median
    picture.add(Box(left, y, compute * scale, 16, COMPUTE))
    if outcome.median > compute:
        rest = (outcome.median - compute) * scale
        picture.add(Box(left + compute * scale, y, rest, 16, color(outcome)))
    low, high = (left + outcome.quantile(share) * scale for share in (0.1, 0.9))
    picture.add(Line([(low, middle), (high, middle)], INK, 1))
    picture.add(*(Line([(at, middle - 4), (at, middle + 4)], INK, 1) for at in (low, high)))
    text = f"{milliseconds(outcome.median)} ms"
    picture.add(Label(high + 8, y + 12, text, 12, SOFT))


def color(outcome: Outcome) -> str:
    """Return the color of what comes beyond computing."""
    if outcome.name.startswith(STOCK):
        return STOCK_COLOUR
    return THEIRS if outcome.name in THEIR or outcome.name == ALONE else OURS
