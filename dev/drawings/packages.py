"""The drawing of Lockstep's packages, from the command line down to the kernel."""

from __future__ import annotations

from dev.drawings.shapes import EDGE, INK, LEFT, RIGHT, SOFT, WASH, Card
from lockstep.tools.report.picture import Box

__all__ = ["ROWS", "draw_packages"]

ROWS = [
    {"tools.commands": "one module per subcommand"},
    {"tools.replay": "lockstep replay, lockstep bisect"},
    {"tools.recipes": "lockstep train", "tools.bench": "lockstep bench"},
    {"tools.report": "report, compare, doctor", "tools.remote": "driver and workers"},
    {"tools.check": "lockstep check, chaos", "tools.plan": "lockstep plan"},
    {"integrations": "the loops of Lightning, transformers, Accelerate"},
    {"training": "Trainer, exact: one step, resuming"},
    {"audit": "micro-batches again", "checkpoint": "states on disk"},
    {"pipeline": "stages, schedules, partition"},
    {"data_parallel": "gradients over ranks"},
    {"model": "what a step knows of a model"},
    {"record": "what a run writes", "data": "order, batches"},
    {"elastic": "rounds of an elastic run"},
    {"launcher": "starts, watches and ends ranks"},
    {"portable": "kernels, and the fingerprint of their bits"},
    {"comm": "all-reduce, backend; csrc/ in C++"},
    {"kernel": "the rules of the guarantee, the step"},
]
"""Packages with what is in them. None imports from a row above its own."""

HEIGHT = 44
GAP = 6
ARROW = 28


def draw_packages() -> Card:
    """Draw a row of boxes for each layer."""
    picture = Card(
        2 * LEFT + len(ROWS) * (HEIGHT + GAP) - GAP,
        "Packages of Lockstep; a package imports only from packages below it",
    )
    bottom = picture.height - LEFT
    picture.add_arrow((LEFT + 4, LEFT), (LEFT + 4, bottom), SOFT, 2)
    y = LEFT
    for row in ROWS:
        x: float = LEFT + ARROW
        width = (RIGHT - x - GAP * (len(row) - 1)) / len(row)
        for name, text in row.items():
            picture.add(Box(x, y, width, HEIGHT, EDGE, 5))
            picture.add(Box(x + 1, y + 1, width - 2, HEIGHT - 2, WASH, 4))
            picture.add_text(x + 9, y + 15, name.removeprefix("tools."), 13, INK, bold=True)
            picture.add_text(x + 9, y + 31, text, 12, SOFT)
            x += width + GAP
        y += HEIGHT + GAP
    return picture
