"""The watch: when each rank worked on what, in the steps that the record keeps.

    each rank   spans of its actions ──> its page of the ledger ─┐
    rank 0      all pages, its own times of the update ──────────┴──> a line "timeline"

The first ten steps are kept, and then every hundredth: of each, some 60 bytes an action
travel with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.model.ledger import Page

__all__ = ["Span", "Watch", "ranks_of"]

FIRST, EVERY = 10, 100
DIGITS = 6  # of a second

Span = tuple[str, int, int, float, float, float, int, int]
"""An action: its kind, stage and micro-batch; begun, ended (by `time.perf_counter`), waited
after it was begun (seconds); for which rank (-1: none), and the bytes that came from it."""


@dataclass(frozen=True)
class Watch:
    """Keeps some steps' spans; `offset` is what `clock_offset` says of this rank's clock."""

    offset: float = 0.0

    def sees(self, step: int) -> bool:
        """Whether the record keeps this step."""
        return step < FIRST or step % EVERY == 0

    def noted(self, page: Page, begun: float, spans: Iterable[Span]) -> Page:
        """Return a page with its spans; `begun` is when the step was, by this rank's clock."""
        rows = [row(span, begun) for span in spans]
        return replace(page, spans=rows, begun=round(begun + self.offset, DIGITS))


def row(span: Span, begun: float) -> list[Any]:
    """Return a span as the record has it: it begins when the waiting is over."""
    kind, stage, leaf, begin, end, waited, source, octets = span
    begin += waited - begun
    rounded = [round(time, DIGITS) for time in (begin, end - begun, waited)]
    return [kind, stage, leaf, *rounded, None if source < 0 else source, octets]


def ranks_of(pages: Sequence[Page], reduced: Sequence[float]) -> list[dict[str, Any]]:
    """Return the ranks of a line "timeline"; none where the step was not seen.

    `reduced` are rank 0's times by its own clock: the ledger read, the gradients added,
    the optimizer done. These end together on all ranks, and are taken to be the same.
    """
    if not any(page.spans for page in pages):
        return []
    read, added, done = reduced
    ranks = []
    for page in pages:
        begin, middle, end = (round(time - page.begun, DIGITS) for time in (read, added, done))
        update = [
            ["reduce", None, None, begin, middle, 0, None, 0],
            ["update", None, None, middle, end, 0, None, 0],
        ]
        ranks.append({"begin": page.begun, "works": page.spans + update})
    return ranks
