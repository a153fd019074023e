"""Drawings of micro-batches, the tree of additions and layouts."""

from __future__ import annotations

from dev.drawings.shapes import EDGE, INK, LEFT, MUTED, RANKS, RIGHT, SOFT, SUM, WASH, Card
from lockstep.kernel.splitting import split_evenly
from lockstep.kernel.tree import Node, TreeAccumulator, nodes_of, split
from lockstep.tools.report.picture import Box, Line

__all__ = [
    "draw_accumulation",
    "draw_binary_counter",
    "draw_layouts",
    "draw_split",
    "draw_tree",
    "draw_tree_of_ranks",
]

M = 8


def name_node(node: Node) -> str:
    """Return the name of a node: its leaves."""
    lo, hi = node
    return str(lo) if hi - lo == 1 else f"{lo}+{lo + 1}" if hi - lo == 2 else f"{lo}…{hi - 1}"


def draw_split() -> Card:
    """Draw how a batch is split, and the loss weights."""
    samples = 30
    parts = split_evenly(samples, M)
    picture = Card(176, f"{samples} samples in {M} micro-batches, with their loss weights")
    picture.add_text(LEFT, 22, f"batch of B = {samples} samples, M = {M}", 13, bold=True)
    scale = (RIGHT - LEFT) / samples
    for number, part in enumerate(parts):
        x = LEFT + part.start * scale
        width = len(part) * scale
        picture.add_text(x + width / 2, 46, str(number), 13, INK, "middle", bold=True)
        for sample in part:
            left = LEFT + sample * scale
            picture.add(Box(left, 60, scale - 1.5, 24, RANKS[number % 2], 2))
        picture.add_text(x + width / 2, 100, f"n={len(part)}", 12, SOFT, "middle")
        picture.add_text(x + width / 2, 120, f"{len(part)}/{samples}", 12, INK, "middle")
    picture.add_lines(
        LEFT, 142,
        ["Each loss is a mean over n samples and is multiplied by n/B,",
         f"so the {M} gradients add up to the gradient of the batch."],
    )  # fmt: skip
    return picture


def draw_nodes(
    picture: Card, leaves: int, top: float, row: float, fill: dict[Node, str], size: float = 12
) -> None:
    """Draw a tree with its leaves on top and its root at the bottom."""
    step = (RIGHT - LEFT) / leaves
    height = 20.0

    def depth(lo: int, hi: int) -> int:
        return (hi - lo - 1).bit_length()

    def place(lo: int, hi: int) -> tuple[float, float]:
        """Draw the node with everything above it; return its position."""
        y = top + depth(lo, hi) * row
        if hi - lo == 1:
            x = LEFT + (lo + 0.5) * step
        else:
            mid = split(lo, hi)
            sources = place(lo, mid), place(mid, hi)
            x = (sources[0][0] + sources[1][0]) / 2
            for from_x, from_y in sources:
                points = [(from_x, from_y + height), (from_x, y + height / 2), (x, y + height / 2)]
                picture.add(Line(points, MUTED))
        width = 26 if hi - lo == 1 else 40
        color = fill.get((lo, hi), SUM)
        picture.add_cell(x - width / 2, y, width, height, name_node((lo, hi)), color, size=size)
        return x, y

    place(0, leaves)


def draw_tree() -> Card:
    """Draw the trees of 8 and of 6 leaves."""
    picture = Card(350, "The trees of additions of 8 and of 6 micro-batches")
    picture.add_text(LEFT, 22, "8 micro-batches: ((0+1)+(2+3)) + ((4+5)+(6+7))", 13, bold=True)
    leaves = {(leaf, leaf + 1): RANKS[0] for leaf in range(M)}
    draw_nodes(picture, 8, 42, 36, leaves)
    picture.add_text(LEFT, 198, "6 micro-batches: ((0+1)+(2+3)) + (4+5)", 13, bold=True)
    draw_nodes(picture, 6, 218, 32, leaves)
    return picture


def draw_binary_counter() -> Card:
    """Draw which partial sums a rank holds after each of 8 micro-batches."""
    fold: TreeAccumulator[str] = TreeAccumulator(M, lambda left, right: f"({left}+{right})")
    row = 27
    top = 62
    left = 84
    picture = Card(top + M * row + 46, "The partial sums that one rank holds")
    picture.add_text(LEFT, 20, "Partial sums held after each micro-batch", 13, bold=True)
    picture.add_text(LEFT, 44, "after", 12, SOFT)
    picture.add_text(RIGHT, 44, "held", 12, SOFT, "end")
    step = (RIGHT - 44 - left) / M
    most = 0
    for leaf in range(M):
        fold.put((leaf, leaf + 1), str(leaf))
        y = top + leaf * row
        picture.add_text(LEFT, y + 10, f"{leaf}", 12, INK, bold=True)
        picture.add_text(LEFT + 18, y + 10, f"{leaf + 1:04b}", 12, SOFT)
        picture.add(Box(left, y, M * step, 20, WASH, 3))
        for lo, hi in fold.nodes:
            is_leaf = hi - lo == 1
            picture.add_cell(
                left + lo * step, y, (hi - lo) * step - 1.5, 20, name_node((lo, hi)),
                RANKS[0] if is_leaf else SUM,
            )  # fmt: skip
        picture.add_text(RIGHT, y + 10, str(len(fold.nodes)), 12, INK, "end")
        most = max(most, len(fold.nodes))
    picture.add_lines(
        LEFT, top + M * row + 12,
        ["The sums held are the ones of the number of micro-batches",
         f"in binary: at most {most} for {M} micro-batches."],
    )  # fmt: skip
    return picture


def draw_tree_of_ranks() -> Card:
    """Draw which rank computes which node, on 1 to 4 ranks."""
    block = 142
    picture = Card(4 * block + 44, "The same tree on 1, 2, 3 and 4 ranks")
    for ranks in range(1, 5):
        top = (ranks - 1) * block
        parts = split_evenly(M, ranks)
        title = "1 rank" if ranks == 1 else f"{ranks} ranks"
        picture.add_text(LEFT, top + 20, title, 13, bold=True)
        x = 96.0
        for rank, own in enumerate(parts):
            picture.add(Box(x, top + 14, 12, 12, RANKS[rank], 2))
            picture.add_text(x + 16, top + 20, f"rank {rank}", 12, SOFT)
            x += 70
            assert len(own) > 0
        fill = {
            node: RANKS[rank]
            for rank, own in enumerate(parts)
            for part in nodes_of(own, M)
            for node in nodes_below(*part)
        }
        draw_nodes(picture, M, top + 34, 27, fill)
        if ranks < 4:
            picture.add(Line([(LEFT, top + block + 4), (RIGHT, top + block + 4)], EDGE, 1))
    y = 4 * block + 22
    picture.add(Box(LEFT, y - 6, 12, 12, SUM, 2))
    picture.add_text(LEFT + 18, y, "added across ranks, in the same order", 12, SOFT)
    return picture


def nodes_below(lo: int, hi: int) -> list[Node]:
    """Return a node and all nodes below it, whose sum it is."""
    if hi - lo == 1:
        return [(lo, hi)]
    mid = split(lo, hi)
    return [(lo, hi), *nodes_below(lo, mid), *nodes_below(mid, hi)]


BLOCKS = 4
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))


def draw_layouts() -> Card:
    """Draw which blocks and micro-batches each rank has in some layouts."""
    block = 122
    picture = Card(len(LAYOUTS) * block + 8, "Blocks and micro-batches of each rank")
    for number, (replicas, stages) in enumerate(LAYOUTS):
        top = number * block
        ranks = replicas * stages
        title = f"{replicas} replica{'s' * (replicas > 1)} x {stages} stage{'s' * (stages > 1)}"
        picture.add_text(LEFT, top + 22, title, 13, bold=True)
        note = f"lockstep run -n {ranks}" if ranks > 1 else "python train.py"
        picture.add_text(RIGHT, top + 22, note, 12, SOFT, "end")
        width = (RIGHT - LEFT + 8) / ranks
        for rank in range(ranks):
            x = LEFT + rank * width
            own = split_evenly(M, replicas)[rank // stages]
            picture.add(Box(x, top + 36, width - 8, 82, WASH, 5))
            picture.add_text(x + 8, top + 50, f"rank {rank}", 12, SOFT)
            held = split_evenly(BLOCKS, stages)[rank % stages]
            for layer in range(BLOCKS):
                name, fill = ("ABCD"[layer], SUM) if layer in held else ("", EDGE)
                picture.add_cell(x + 8 + layer * 18, top + 61, 16, 18, name, fill)
            for place, microbatch in enumerate(own):
                size = min(18.0, (width - 24) / len(own))
                picture.add_cell(
                    x + 8 + place * size, top + 90, size - 2, 20, str(microbatch),
                    RANKS[rank // stages],
                )  # fmt: skip
    return picture


def draw_accumulation() -> Card:
    """Draw one step over time on 1, 2 and 4 ranks."""
    picture = Card(344, "One step with 8 micro-batches on 1, 2 and 4 ranks")
    picture.add_text(LEFT, 22, "One step of 8 micro-batches", 13, bold=True)
    picture.add_text(RIGHT, 22, "time →", 12, SOFT, "end")
    left = 66.0
    y = 40.0
    reduction = 36.0
    update = 36.0
    height = 24.0
    unit = (RIGHT - left - update) / M
    for ranks in (1, 2, 4):
        parts = split_evenly(M, ranks)
        end = left + max(map(len, parts)) * unit + (reduction if ranks > 1 else 0)
        for rank, own in enumerate(parts):
            picture.add_text(LEFT, y + height / 2, f"rank {rank}", 12, SOFT)
            picture.add(Box(left, y, RIGHT - left, height, WASH, 3))
            for place, microbatch in enumerate(own):
                x = left + place * unit
                picture.add_cell(x, y, unit - 1, height, str(microbatch), RANKS[rank])
            if ranks > 1:
                x = left + len(own) * unit
                picture.add_cell(x, y, end - x - 1, height, "sum", SUM)
            picture.add_cell(end, y, update, height, "step", MUTED, INK)
            y += height + 4
        y += 16
    picture.add_lines(
        LEFT, y + 4,
        ["A number is the forward and backward of a micro-batch.",
         "step: the optimizer, once, on every rank."],
    )  # fmt: skip
    return picture
