"""Drawings of message passing: the values of 4 ranks before and after each call.

The values come from the tables of the page, which `tests/examples/test_message_passing.py`
compares with the output of the examples:

    broadcast from rank 1             title
                 before   after       columns; `a | b` is a list, `-` is None
        rank 0   1 2      11 12

A value has the color of the rank that had it before the call; sums have a separate color.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dev.drawings.shapes import EDGE, HEAVY, INK, LEFT, MUTED, RANKS, RIGHT, SOFT, SUM, WASH, Card
from lockstep.tools.report.picture import Box, Line

__all__ = [
    "COLLECTIVES", "Table", "draw_asynchronous", "draw_barrier", "draw_collective",
    "draw_deadlock", "draw_exchange", "draw_tags", "draw_token", "read_tables",
]  # fmt: skip

COLLECTIVES = {
    "broadcast": "broadcast from rank 1",
    "scatter": "scatter from rank 0",
    "gather": "gather at rank 0",
    "reduce": "reduce to rank 0",
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "groups": "groups: even and odd ranks add up",
}
"""The collectives that are drawn, and the titles of their tables."""

CELL = 25
ROW = 36
TOP = 62
UNDEFINED = "undefined"


@dataclass(frozen=True)
class Table:
    """The table of an example: columns of one text per rank."""

    title: str
    columns: dict[str, list[str]]


def read_tables(page: Path) -> dict[str, Table]:
    """Return the tables of the page by their titles."""
    tables = {}
    for title, head, rows in re.findall(
        r"^```text\n(.+)\n( {8,}\S.*)\n((?:    rank .*\n)+)```$", page.read_text(), re.MULTILINE
    ):
        begins = [match.start() for match in re.finditer(r"\S+", head)]
        ends = [*begins[1:], None]
        names = head.split()
        columns = {
            name: [line[begin:end].strip() for line in rows.splitlines()]
            for name, begin, end in zip(names, begins, ends, strict=True)
        }
        tables[title] = Table(title, columns)
    return tables


def split_values(text: str) -> list[list[str]]:
    """Return the tensors of a list, each as a list of its values; an empty list for None."""
    if text == "-":
        return []
    return [[part] if part == UNDEFINED else part.split() for part in text.split(" | ")]


def draw_collective(table: Table) -> Card:
    """Draw the values of each rank before and after a call."""
    before, after = (
        [split_values(text) for text in table.columns[name]] for name in ("before", "after")
    )
    ranks = len(before)
    picture = Card(TOP + ranks * ROW + 10, f"{table.title}: before and after, {ranks} ranks")
    picture.add_text(LEFT, 20, table.title, 13, bold=True)
    origins = (
        {}
        if is_sum(table)
        else {value: rank for rank, row in enumerate(before) for tensor in row for value in tensor}
    )
    columns = [(LEFT + 48, before), (0.0, after)]
    columns[1] = (RIGHT - max(32, *map(measure, after)), after)
    ends = [LEFT + 48 + measure(row) for row in before]
    begin = columns[1][0]
    for name, (x, _) in zip(("before", "after"), columns, strict=True):
        picture.add_text(x, 46, name, 12, SOFT)
    for target, row in enumerate(after):
        for source in find_sources(table, before, row, origins, target):
            color = RANKS[source]
            y0, y1 = (TOP + rank * ROW + CELL / 2 for rank in (source, target))
            picture.add(Line([(ends[source] + 3, y0), (begin - 10, y1)], color, 1.5))
        if row and row != [[UNDEFINED]]:
            picture.add_head((begin - 3, TOP + target * ROW + CELL / 2), color=INK)
    for rank in range(ranks):
        y = TOP + rank * ROW
        picture.add_text(LEFT, y + CELL / 2, f"rank {rank}", 12, SOFT)
        for x, values in columns:
            draw_values(picture, x, y, values[rank], rank if values is before else None, origins)
    return picture


def find_sources(
    table: Table,
    before: list[list[list[str]]],
    row: list[list[str]],
    origins: dict[str, int],
    target: int,
) -> list[int]:
    """Return the ranks whose values a rank has after the call."""
    values = [value for tensor in row for value in tensor]
    if not values or values == [UNDEFINED]:
        return []
    if origins:
        return sorted({origins[value] for value in values})
    step = 2 if table.title.startswith("groups") else 1
    return [rank for rank in range(len(before)) if rank % step == target % step]


def is_sum(table: Table) -> bool:
    """Return whether a call adds values.

    The values alone do not show it: a sum may be equal to a value that a rank had.
    """
    return "reduce" in table.title or table.title.startswith("groups")


def measure(row: list[list[str]]) -> float:
    """Return the width of the cells of a rank, in points."""
    cells = sum(80 if tensor == [UNDEFINED] else len(tensor) * CELL for tensor in row)
    return cells + 5 * max(0, len(row) - 1)


def draw_values(
    picture: Card,
    x: float,
    y: float,
    row: list[list[str]],
    rank: int | None,
    origins: dict[str, int],
) -> None:
    """Draw the tensors of a rank; `rank` is None after the call."""
    if not row:
        picture.add_text(x, y + CELL / 2, "None", 12, MUTED)
    for tensor in row:
        if tensor == [UNDEFINED]:
            picture.add_cell(x, y, 80, CELL, UNDEFINED, EDGE, SOFT)
            continue
        for value in tensor:
            origin = origins.get(value) if rank is None else rank
            color = SUM if origin is None else RANKS[origin]
            picture.add_cell(x, y, CELL - 1, CELL, value, color)
            x += CELL
        x += 5


LANE = 26
STEP = 36
COMPUTE = ("#5c6878", "#ffffff")
WAIT = (EDGE, SOFT)


def draw_barrier() -> Card:
    """Draw ranks that reach a barrier at different times."""
    arrivals = (0.35, 0.6, 0.2, 0.45)
    picture = Card(96 + len(arrivals) * STEP, "A barrier: all ranks continue together")
    picture.add_text(LEFT, 20, "barrier", 13, bold=True)
    left = 70.0
    top = 40.0
    width = RIGHT - left
    leave = left + (max(arrivals) + 0.02) * width
    for rank, arrival in enumerate(arrivals):
        x = left + arrival * width
        spans = [(left, x, "work", *COMPUTE)]
        if leave - x > 20:
            spans.append((x, leave, "waits" if leave - x > 45 else "", *WAIT))
        spans.append((leave, RIGHT, "work", *COMPUTE))
        picture.add_lane(top + rank * STEP, LANE, f"rank {rank}", spans)
    bottom = top + len(arrivals) * STEP
    picture.add(Line([(leave, top - 6), (leave, bottom)], INK, HEAVY))
    picture.add_text(leave, bottom + 10, "the last rank arrives", 12, INK, "middle")
    picture.add_text(RIGHT, bottom + 34, "time →", 12, SOFT, "end")
    return picture


def draw_token(table: Table) -> Card:
    """Draw blocking sends and receives around a ring."""
    final = table.columns["token"]
    ranks = len(final)
    picture = Card(108 + ranks * STEP, "send and recv: a token goes around the ring")
    picture.add_text(LEFT, 20, "send and recv: once around the ring", 13, bold=True)
    left = 70.0
    top = 44.0
    unit = (RIGHT - left - 6) / 9
    # Rank 0 sends first; rank r receives from rank r - 1, then sends. A call takes one time unit.
    for rank in range(ranks):
        begin = left + 2 * rank * unit
        spans = [(begin, begin + unit, "send", RANKS[rank], "#ffffff")]
        if rank:
            previous = RANKS[rank - 1]
            spans.insert(0, (begin - unit, begin, "recv", previous, "#ffffff"))
            spans.insert(0, (left, begin - unit, "waits" if rank > 1 else "", *WAIT))
        else:
            end = left + 2 * ranks * unit
            spans.append((begin + unit, end - unit, "waits in recv", *WAIT))
            spans.append((end - unit, end, "recv", RANKS[ranks - 1], "#ffffff"))
        picture.add_lane(top + rank * STEP, LANE, f"rank {rank}", spans)
    for rank in range(ranks):
        x = left + (2 * rank + 1) * unit
        y = top + rank * STEP
        target = top + ((rank + 1) % ranks) * STEP
        if target > y:
            picture.add_arrow((x - unit / 2, y + LANE + 1), (x + unit / 2 - 4, target - 1), INK)
        else:
            picture.add_arrow((x - unit / 3, y - 1), (x + unit / 2 - 6, target + LANE + 1), INK)
    bottom = top + ranks * STEP + 8
    tokens = ", ".join(final[1:])
    picture.add_lines(
        LEFT, bottom + 4,
        ["recv returns when the message has arrived.",
         f"The token is {tokens}; rank 0 receives {final[0]}."],
    )  # fmt: skip
    picture.add_text(RIGHT, bottom + 42, "time →", 12, SOFT, "end")
    return picture


def draw_exchange(table: Table) -> Card:
    """Draw isend and irecv that overlap with computation."""
    sent = table.columns["sent"]
    received = table.columns["received"]
    ranks = len(sent)
    step = 52
    picture = Card(112 + ranks * step, "isend and irecv: messages overlap with computation")
    picture.add_text(LEFT, 20, "isend, irecv: all neighbours at the same time", 13, bold=True)
    left = 70
    top = 40
    start = left + 46
    done = left + 200
    end = left + 252
    for rank in range(ranks):
        y = top + rank * step
        source = int(received[rank])
        spans = [
            (left, start, "isend", RANKS[rank], "#ffffff"),
            (start, end, "computes", *COMPUTE),
            (end, RIGHT, "wait()", RANKS[source], "#ffffff"),
        ]
        picture.add_lane(y, 22, f"rank {rank}", spans)
        text = f"{received[rank]} arrives from rank {source}"
        picture.add_cell(start, y + 25, done - start, 18, text, RANKS[source], size=11)
    bottom = top + ranks * step + 6
    picture.add_lines(
        LEFT, bottom + 8,
        ["isend and irecv return immediately. Do not use their",
         "tensors before wait() has returned. It takes no time here,",
         "because the messages arrived during the computation."],
    )  # fmt: skip
    return picture


def draw_asynchronous() -> Card:
    """Draw a blocking and an asynchronous all-reduce."""
    picture = Card(218, "A blocking and an asynchronous all_reduce of one rank")
    left = 106
    rows = (
        (
            "all_reduce(t)",
            44,
            "blocking",
            [("all_reduce", 0, 120, "c"), ("compute", 120, 240, "w")],
        ),
        ("async_op=True", 112, "asynchronous", [("compute", 8, 128, "w"), ("", 128, 142, "c")]),
    )
    for call, y, title, spans in rows:
        picture.add_text(LEFT, y - 22, title, 13, bold=True)
        picture.add_text(LEFT, y + 11, call, 11, SOFT)
        picture.add(Box(left, y, RIGHT - left, 22, WASH, 3))
        for text, begin, end, kind in spans:
            fill = RANKS[0] if kind == "c" else COMPUTE[0]
            picture.add_cell(left + begin, y, end - begin - 1, 22, text, fill, size=11)
    picture.add_cell(left, 137, 130, 20, "all_reduce", RANKS[0], size=11)
    picture.add_text(LEFT, 147, "background", 11, SOFT)
    picture.add_text(left + 150, 123, "wait()", 11, INK)
    picture.add_lines(
        LEFT, 176,
        ["The call returns a handle. Compute with other tensors, then",
         "call handle.wait() before you use t."],
    )  # fmt: skip
    return picture


def draw_deadlock() -> Card:
    """Draw two ranks that both send first, and the orders that work."""
    picture = Card(318, "Two ranks that both send first wait for each other")
    left = 70.0
    sections = (
        ("both send first: a deadlock", (("send", "never: recv"), ("send", "never: recv"))),
        ("one sends first, the other receives first", (("send", "recv"), ("recv", "send"))),
        ("both post isend, then recv", (("isend", "recv", "wait"), ("isend", "recv", "wait"))),
    )
    y = 22.0
    for title, lanes in sections:
        picture.add_text(LEFT, y, title, 13, bold=True)
        y += 16
        is_stuck = lanes[0][1].startswith("never")
        for rank, calls in enumerate(lanes):
            width = (RIGHT - left) / len(calls)
            spans = []
            for place, call in enumerate(calls):
                begin = left + place * width
                end = begin + width
                name = call.removeprefix("never: ")
                if is_stuck:
                    begin, end = (left, left + 190) if place == 0 else (left + 190, RIGHT)
                    fill = ("#a8262b", "#ffffff") if place == 0 else (EDGE, MUTED)
                    text = "send waits for recv" if place == 0 else "recv, not reached"
                else:
                    fill = (RANKS[0 if "send" in name else 2], "#ffffff")
                    text = name
                    if name == "wait":
                        fill = COMPUTE
                spans.append((begin, end, text, *fill))
            picture.add_lane(y, 24, f"rank {rank}", spans)
            y += 30
        y += 24
    return picture


def draw_tags() -> Card:
    """Draw how messages match by sender and tag."""
    picture = Card(196, "Messages match by sender and tag, in the order of sending")
    picture.add_text(LEFT, 20, "Tags: received in another order than sent", 13, bold=True)
    picture.add_text(LEFT, 46, "rank 1 sends", 12, SOFT)
    picture.add_text(RIGHT, 46, "rank 0 receives", 12, SOFT, "end")
    width = 130
    calls = (("isend(loss, tag=1)", 0), ("isend(norm, tag=2)", 1))
    receives = (("recv(tag=2)", 1), ("recv(tag=1)", 0))
    for place, ((sent, kind), (received, other)) in enumerate(zip(calls, receives, strict=True)):
        y = 62 + place * 50
        picture.add_cell(LEFT, y, width, 28, sent, RANKS[1 + kind], size=12)
        picture.add_cell(RIGHT - width + 20, y, width - 20, 28, received, RANKS[1 + other], size=12)
    for kind in (0, 1):
        begin = (LEFT + width + 4, 76.0 + 50 * kind)
        end = (RIGHT - width + 16, 76.0 + 50 * (1 - kind))
        picture.add_arrow(begin, end, RANKS[1 + kind], HEAVY)
    picture.add_text(LEFT, 168, "Without a tag, messages of one sender arrive in order.", 12, SOFT)
    return picture
