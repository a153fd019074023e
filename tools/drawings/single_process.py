"""A drawing of measured steps: one process with threads, and one process per device.

`benchmarks/single_process.py` measures the spans and writes them beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.report.picture import text_width
from lockstep.report.timeline import COLORS
from tools.drawings.shapes import INK, LEFT, MUTED, RIGHT, SOFT, Card

__all__ = ["MEASURED", "draw_single_process"]

MEASURED = Path(__file__).with_suffix(".json")
NAMES = {
    "threads": "ls.DataParallel: 1 process, 2 threads",
    "processes": "ls.DistributedDataParallel: 2 processes",
}
LANE, GAP, NAME_WIDTH = 20, 4, 70
WHITE = "#ffffff"

Span = tuple[str, str, float, float]
"""The lane, the kind, and the begin and the end in milliseconds."""


def draw_single_process() -> Card:
    """Draw a step of each network in both ways, on one axis of time per network."""
    networks = json.loads(MEASURED.read_text())
    lanes = sum(len(list_lanes(spans)) for steps in networks.values() for spans in steps.values())
    height = 40 + lanes * (LANE + GAP) + len(networks) * (34 + len(NAMES) * 28)
    picture = Card(height, "Measured steps of one process with two threads and of two processes")
    y = 22.0
    for network, steps in networks.items():
        longest = max(end for spans in steps.values() for *_, end in spans)
        scale = (RIGHT - LEFT - NAME_WIDTH) / longest
        picture.add_text(LEFT, y, network.capitalize(), 14, bold=True)
        picture.add_text(RIGHT, y, "time →", 12, SOFT, "end")
        y += 26
        for name, spans in steps.items():
            length = max(end for *_, end in spans)
            picture.add_text(LEFT, y, NAMES[name], 12, INK)
            picture.add_text(RIGHT, y, f"{length:.0f} ms", 12, SOFT, "end")
            y += 12
            for lane, own in list_lanes([tuple(each) for each in spans]).items():
                drawn = [_cell(span, scale) for span in own]
                picture.add_lane(y, LANE, lane, drawn, left=LEFT + NAME_WIDTH)
                y += LANE + GAP
            y += 16
        y += 8
    x = float(LEFT)
    for name, fill in [("forward", _fill("forward")), ("backward", _fill("backward")),
                       ("the rest of the step", MUTED)]:  # fmt: skip
        picture.add_cell(x, y - 6, 12, 12, "", fill)
        picture.add_text(x + 18, y, name, 12, SOFT)
        x += 34 + text_width(name, 12)
    return picture


def list_lanes(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Return the spans by lane; the calling thread, or the process, has the rest of the step."""
    work = [each for each in spans if each[1] != "step"]
    steps = [each for each in spans if each[1] == "step"]
    lanes: dict[str, list[Span]] = {}
    if any(lane.startswith("device") for lane, *_ in work):
        lanes["caller"] = list(_find_rest("caller", work, steps[0]))
    for span in sorted(work):
        lanes.setdefault(span[0], []).append(span)
    for lane, own in lanes.items():
        if lane.startswith("process"):
            end = max(step[3] for step in steps)
            own.append((lane, "rest", max(each[3] for each in own), end))
    return lanes


def _find_rest(lane: str, work: Sequence[Span], step: Span) -> Iterator[Span]:
    """Yield the times in which no device computes."""
    time = step[2]
    for _, _, begin, end in sorted(work, key=lambda span: span[2]):
        if begin > time:
            yield (lane, "rest", time, begin)
        time = max(time, end)
    yield (lane, "rest", time, step[3])


def _cell(span: Span, scale: float) -> tuple[float, float, str, str, str]:
    _, kind, begin, end = span
    left = LEFT + NAME_WIDTH
    width = (end - begin) * scale
    text = kind if kind != "rest" and text_width(kind, 11) < width - 6 else ""
    # add_lane leaves a gap of one point after each span.
    return left + begin * scale, left + begin * scale + max(width, 1.6), text, _fill(kind), WHITE


def _fill(kind: str) -> str:
    return COLORS[kind][0] if kind in COLORS else MUTED
