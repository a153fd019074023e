"""Draws the pictures of the documentation from the project's own plans and examples.

    python -m dev.drawings          writes docs/pictures/*.svg

`tests/dev/test_drawings.py` fails if a committed picture differs from the drawn one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dev.drawings import batches, memory, messages, packages, schedules
from dev.drawings.shapes import Card
from lockstep.pipeline.schedules import NAMES

__all__ = ["FOLDER", "PAGE", "draw_all"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/pictures"
PAGE = ROOT / "docs/guides/message-passing.md"


def draw_all() -> Mapping[str, Card]:
    """Return all pictures by file name."""
    tables = messages.read_tables(PAGE)
    pictures: dict[str, Callable[[], Card]] = {
        "micro-batches": batches.draw_split,
        "accumulation": batches.draw_accumulation,
        "tree": batches.draw_tree,
        "binary-counter": batches.draw_binary_counter,
        "tree-on-ranks": batches.draw_tree_of_ranks,
        "layouts": batches.draw_layouts,
        **{f"schedule-{name}": partial(schedules.draw_schedule, name) for name in NAMES},
        "schedule-memory": schedules.draw_held,
        "bubbles": schedules.draw_bubbles,
        "all-reduce-sockets": memory.draw_sockets,
        "all-reduce-segment": memory.draw_segment,
        "storage": memory.draw_storage,
        **{
            name: partial(messages.draw_collective, tables[title])
            for name, title in messages.COLLECTIVES.items()
        },
        "barrier": messages.draw_barrier,
        "send-recv": partial(
            messages.draw_token, tables["send, recv: once around the ring, adding one"]
        ),
        "isend-irecv": partial(messages.draw_exchange, tables["isend, irecv: to the right"]),
        "asynchronous": messages.draw_asynchronous,
        "deadlock": messages.draw_deadlock,
        "packages": packages.draw_packages,
        "tags": messages.draw_tags,
    }
    return {f"{name}.svg": draw() for name, draw in pictures.items()}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in draw_all().items():
        (FOLDER / name).write_text(picture.svg())


if __name__ == "__main__":
    main()
