"""Drawings of the paths that data takes between the ranks of one host."""

from __future__ import annotations

from dev.drawings.shapes import EDGE, INK, LEFT, MUTED, RANKS, RIGHT, SOFT, SUM, WASH, Card
from lockstep.kernel.splitting import split_evenly
from lockstep.tools.report.picture import Box

__all__ = ["draw_segment", "draw_sockets", "draw_storage"]

N = 2


def draw_sockets() -> Card:
    """Draw the path of a slice over TCP."""
    picture = Card(252, "An all-reduce over TCP: each slice passes through the kernel")
    picture.add_text(LEFT, 22, "Gloo: through sockets", 13, bold=True)
    width = 104
    for rank in range(N):
        x = LEFT if rank == 0 else RIGHT - width
        picture.add(Box(x, 42, width, 118, WASH, 6))
        picture.add_text(x + width / 2, 56, f"rank {rank}", 12, SOFT, "middle")
        for part in range(N):
            picture.add_cell(
                x + 8, 70 + part * 44, width - 16, 36, f"slice {part}",
                RANKS[rank],
            )  # fmt: skip
    middle = (RIGHT - LEFT) / 2 + LEFT
    picture.add(Box(middle - 52, 42, 104, 118, EDGE, 6))
    picture.add_text(middle, 56, "kernel", 12, SOFT, "middle")
    for part, source in ((0, 1), (1, 0)):
        y = 70 + part * 44
        picture.add_cell(middle - 40, y, 80, 36, "socket buffer", RANKS[source], size=11)
        ends = [(LEFT + width - 6, middle - 42), (middle + 42, RIGHT - width + 6)]
        for begin, end in ends if source == 0 else [pair[::-1] for pair in ends[::-1]]:
            picture.add_arrow((begin, y + 18), (end, y + 18), INK)
    picture.add_lines(
        LEFT, 178,
        ["Each slice is copied into the kernel, copied out again and",
         "then added. The sums go back in the same way. Each copy",
         "reads and writes memory, and each message costs system",
         "calls and a wake-up of the other process."],
    )  # fmt: skip
    return picture


def draw_segment() -> Card:
    """Draw the direct path of an all-reduce in shared memory."""
    picture = Card(312, "An all-reduce in shared memory: each rank adds its own slice")
    picture.add_text(LEFT, 22, "lockstep: in shared memory", 13, bold=True)
    parts = split_evenly(4, N)
    middle = (LEFT + RIGHT) / 2
    width = (RIGHT - LEFT - 24) / N
    for rank in range(N):
        x = LEFT + 8 + rank * (width + 8)
        if rank == 0:
            picture.add(Box(LEFT, 42, RIGHT - LEFT, 84, WASH, 6))
            picture.add_text(middle, 56, "segment, mapped by both ranks", 12, SOFT, "middle")
        picture.add_text(x + width / 2, 76, f"tensor of rank {rank}", 12, INK, "middle")
        for part, span in enumerate(parts):
            each = width / 4
            picture.add_cell(
                x + span.start * each, 88, len(span) * each - 2, 28, f"slice {part}",
                RANKS[rank],
            )  # fmt: skip
    picture.add_text(LEFT, 148, "barrier: both tensors are complete", 12, SOFT)
    for rank in range(N):
        x = LEFT + 8 + rank * (width + 8)
        picture.add_cell(x, 164, width - 2, 34, f"rank {rank}: slice {rank} + slice {rank}", SUM)
    picture.add_text(LEFT, 218, "barrier: both sums are complete", 12, SOFT)
    picture.add(Box(LEFT, 234, RIGHT - LEFT, 40, WASH, 6))
    for rank in range(N):
        x = LEFT + 8 + rank * (width + 8)
        for part, span in enumerate(parts):
            each = width / 4
            picture.add_cell(
                x + span.start * each, 240, len(span) * each - 2, 28, f"sum {part}", SUM
            )
    picture.add_text(LEFT, 292, "Every element is read once and written once.", 12, SOFT)
    return picture


def draw_storage() -> Card:
    """Draw the memory of parameters and optimizer state with both kinds of storage."""
    ranks = 3
    picture = Card(326, "Replicated and shared storage of parameters on a host")
    width = (RIGHT - LEFT + 8) / ranks
    for top, name in ((0, "replicated"), (162, "shared")):
        picture.add_text(LEFT, top + 22, f'storage="{name}"', 13, bold=True)
        picture.add_text(RIGHT, top + 22, f"{ranks} ranks of one host", 12, SOFT, "end")
        for rank in range(ranks):
            x = LEFT + rank * width
            picture.add(Box(x, top + 36, width - 8, 114, WASH, 6))
            picture.add_text(x + 8, top + 50, f"rank {rank}", 12, SOFT)
            picture.add_cell(x + 8, top + 62, width - 24, 22, "gradients", RANKS[rank])
            if name == "replicated":
                picture.add_cell(x + 8, top + 88, width - 24, 24, "parameters", SUM)
                picture.add_cell(x + 8, top + 116, width - 24, 24, "optimizer", MUTED)
        if name == "shared":
            x = LEFT + 8
            whole = RIGHT - LEFT - 16
            for y, text, fill in ((88, "parameters", SUM), (116, "optimizer state", MUTED)):
                picture.add_cell(x, top + y, whole, 24, f"{text}, one copy", fill)
    return picture
