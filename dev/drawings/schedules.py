"""Drawings of pipeline schedules, from their simulations with unit costs."""

from __future__ import annotations

from collections import Counter

from dev.drawings.shapes import EDGE, HEAVY, INK, LEFT, RANKS, RIGHT, SOFT, WASH, Card
from lockstep.formatting import format_percent
from lockstep.pipeline.schedules import build_schedule
from lockstep.pipeline.simulation import Simulation, simulate
from lockstep.tools.report.picture import Box, Line

__all__ = ["draw_bubbles", "draw_held", "draw_schedule"]

P = 3
M = 6
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradient of the input",
    "weight": "gradient of the weights",
}
LANE = 26
HALF_LANE = 18
NAME_WIDTH = 18
COLORS = {
    "forward": ("#0b6bb8", "#3f92d2", "#75b3e2", "#a5cfee"),
    "backward": ("#14825a", "#3f9f7c", "#74bd9f", "#a6d6c2"),
    "input": ("#00808c", "#3199a3", "#6bb8bf", "#a2d3d7"),
    "weight": ("#8a6d00", "#a88d2c", "#c2ac5e", "#d9ca92"),
}
"""The colors of each kind of work: for a rank's first stage, its second, ..."""


def run_schedule(name: str, ranks: int = P, microbatches: int = M) -> Simulation:
    """Simulate a schedule with unit costs."""
    return simulate(build_schedule(name, ranks, microbatches))


def draw_schedule(name: str) -> Card:
    """Draw one schedule; the stages of a rank are below each other."""
    simulation = run_schedule(name)
    longest = max(run_schedule(shown).makespan for shown in ("gpipe", name))
    kinds = [kind for kind in KINDS if any(s.action.kind == kind for s in simulation.spans)]
    shades = 2 if name == "interleaved" else 1
    entries = [
        (KINDS[kind] + (f", {('first', 'second')[shade]} stage" if shades > 1 else ""),
         COLORS[kind][2 * shade])
        for kind in kinds
        for shade in range(shades)
    ]  # fmt: skip
    legend = 22 * ((len(entries) + 1) // 2)
    lane, gap = (2 * HALF_LANE + 1, 9) if shades > 1 else (LANE, 4)
    left = LEFT + NAME_WIDTH
    top = 62
    bottom = top + P * (lane + gap)
    picture = Card(bottom + 32 + legend, f"The schedule {name}: {P} ranks")
    picture.add_text(LEFT, 22, name, 14, bold=True)
    picture.add_text(RIGHT, 22, f"{P} ranks, {M} micro-batches", 12, SOFT, "end")
    picture.add_text(LEFT, 48, "rank", 12, SOFT)
    picture.add_text(RIGHT, 48, "time →", 12, SOFT, "end")
    scale = (RIGHT - left) / longest
    for rank in range(P):
        y = top + rank * (lane + gap)
        picture.add_text(LEFT, y + lane / 2, str(rank), 12, SOFT)
        picture.add(Box(left, y, simulation.makespan * scale, lane, WASH, 2))
    for span in simulation.spans:
        row = span.action.stage // P
        height = HALF_LANE if shades > 1 else LANE
        picture.add_cell(
            left + span.begin * scale,
            top + span.rank * (lane + gap) + row * (HALF_LANE + 1),
            (span.end - span.begin) * scale - 1,
            height,
            str(span.action.microbatch),
            COLORS[span.action.kind][2 * row],
            "#ffffff" if row == 0 else INK,
            12 if span.end - span.begin >= 1 else 10,
            1.5,
        )
    y = bottom + 10
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peaks)
    picture.add_text(
        LEFT, y,
        f"{simulation.makespan:g} units, bubble {format_percent(simulation.bubble)}; "
        f"held at most: {peaks}", 12, INK,
    )  # fmt: skip
    for number, (label, color) in enumerate(entries):
        x = LEFT + (number % 2) * 184
        at = y + 24 + 22 * (number // 2)
        picture.add(Box(x, at - 6, 12, 12, color, 2))
        picture.add_text(x + 18, at, label, 12, SOFT)
    return picture


def draw_held() -> Card:
    """Draw the activations that rank 0 holds over time, with GPipe and 1F1B."""
    picture = Card(226, "Micro-batches whose activations rank 0 holds, GPipe and 1F1B")
    picture.add_text(LEFT, 22, "Activations held by rank 0", 14, bold=True)
    picture.add_text(RIGHT, 22, "in micro-batches", 12, SOFT, "end")
    left = LEFT + 22.0
    bottom = 178.0
    height = 124.0
    simulations = {name: run_schedule(name) for name in ("gpipe", "1f1b")}
    scale = (RIGHT - left) / max(simulation.makespan for simulation in simulations.values())
    for level in range(0, M + 1, 2):
        line = bottom - level * height / M
        picture.add(Line([(left, line), (RIGHT, line)], EDGE, 1))
        picture.add_text(LEFT, line, str(level), 12, SOFT)
    for (name, simulation), color, offset in zip(
        simulations.items(), (RANKS[1], RANKS[0]), (0.0, 1.5), strict=True
    ):
        changes: Counter[float] = Counter()
        for span in simulation.spans:
            if span.rank == 0:
                is_forward = span.action.kind == "forward"
                changes[span.begin if is_forward else span.end] += 1 if is_forward else -1
        y = bottom + offset
        points = [(left, y)]
        for time in sorted(changes):
            points.append((left + time * scale, y))
            y -= changes[time] * height / M
            points.append((left + time * scale, y))
        picture.add(Line(points, color, HEAVY))
        x = LEFT + (130 if name == "1f1b" else 0)
        picture.add(Box(x, 200, 18, 4, color, 1))
        picture.add_text(x + 24, 202, name, 12, SOFT)
    picture.add_text(RIGHT, 202, "time", 12, SOFT, "end")
    return picture


def draw_bubbles() -> Card:
    """Draw the bubble over the number of micro-batches, for 4 ranks."""
    ranks = 4
    counts = (4, 8, 12, 16, 20, 24, 28, 32)
    picture = Card(280, f"The bubble of {ranks} ranks with 4 to 32 micro-batches")
    picture.add_text(LEFT, 22, f"Bubble of {ranks} ranks", 14, bold=True)
    picture.add_text(RIGHT, 22, "share of idle time", 12, SOFT, "end")
    left = LEFT + 40.0
    right = RIGHT - 8.0
    bottom = 198.0
    height = 150.0
    highest = 0.5
    for percent in range(0, 51, 10):
        y = bottom - percent / 100 / highest * height
        picture.add(Line([(left, y), (right, y)], EDGE, 1))
        picture.add_text(left - 8, y, f"{percent}%", 12, SOFT, "end")
    scale = (right - left) / (counts[-1] - counts[0])
    for count in counts:
        x = left + (count - counts[0]) * scale
        picture.add_text(x, bottom + 16, str(count), 12, SOFT, "middle")
    colors = {"1f1b": RANKS[0], "interleaved": RANKS[2], "zero-bubble": RANKS[3]}
    labels = {"1f1b": "gpipe, 1f1b", "interleaved": "interleaved", "zero-bubble": "zero-bubble"}
    for number, (name, color) in enumerate(colors.items()):
        points = [
            (left + (count - counts[0]) * scale,
             bottom - run_schedule(name, ranks, count).bubble / highest * height)
            for count in counts
        ]  # fmt: skip
        picture.add(Line(points, color, HEAVY))
        x = LEFT + (0, 112, 218)[number]
        picture.add(Box(x, 258, 16, 4, color, 1))
        picture.add_text(x + 21, 260, labels[name], 12, SOFT)
    picture.add_text(RIGHT, bottom + 32, "micro-batches", 12, SOFT, "end")
    return picture
