"""The files for checking and repeating a run: checkpoints, sources, fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.formatting import format_bytes, format_duration, format_quantity
from lockstep.kernel.errors import FileError
from lockstep.model.fingerprint_file import FOLDER, list_fingerprints
from lockstep.record.reader import Run
from lockstep.tools.report.summary import as_text, number_or

__all__ = [
    "CHECKPOINT_COLUMNS",
    "ReproductionSummary",
    "checkpoint_table",
    "summarize_reproduction",
]

CHECKPOINT_COLUMNS = ("steps", "after", "size", "digest of the weights")
MAX_ROWS = 40  # rows of a table
SHOWN_DIGITS = 16  # digits of a digest


def checkpoint_table(run: Run) -> list[list[str]]:
    """Return the checkpoints as rows of text."""
    rows = []
    for line in run.checkpoints:
        size, time = number_or(line.get("bytes")), number_or(line.get("t"))
        digest = as_text(line.get("digest"))
        rows.append(
            [
                _format_step(line.get("step")),
                format_duration(time) if math.isfinite(time) else "",
                format_bytes(size) if math.isfinite(size) else "",
                digest[:SHOWN_DIGITS] + "..." * (len(digest) > SHOWN_DIGITS),
            ]
        )
    return shorten_table(rows)


@dataclass(frozen=True)
class ReproductionSummary:
    """The summary of the files for checking and repeating a run.

    Attributes:
        sentences: Sentences about its sources and fingerprints.
        remarks: Sentences about unreadable or incomplete files.
    """

    sentences: list[str]
    remarks: list[str]


def summarize_reproduction(run: Run) -> ReproductionSummary:
    """Return the summary of the files for checking and repeating a run."""
    sentences: list[str] = []
    if sources := as_text(run.latest("sources")):
        sentences.append(f"Copies of the program's own files are in {sources}.")
    try:
        fingerprints = list_fingerprints(run.folder)
        remarks = list(fingerprints.remarks)
    except FileError as error:
        fingerprints, remarks = None, [f"{error}."]
    if fingerprints is not None and fingerprints.steps:
        steps, ranks = [*fingerprints.steps], max(map(len, fingerprints.steps.values()))
        sentences.append(
            f"Hashes of what each unit computed in {format_quantity(len(steps), 'step')} "
            f"({steps[0]:,} to {steps[-1]:,}, {format_quantity(ranks, 'rank')}) are in {FOLDER}."
        )
    return ReproductionSummary(sentences, remarks)


def _format_step(value: Any) -> str:
    number = number_or(value)
    return f"{number:,.0f}" if math.isfinite(number) else "?"


def shorten_table(rows: list[list[str]]) -> list[list[str]]:
    """Return the first and last rows of a long table, and between them the number left out."""
    if len(rows) <= MAX_ROWS:
        return rows
    half = MAX_ROWS // 2
    hidden: Sequence[str] = [f"... {len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 1)]
    return [*rows[:half], [*hidden], *rows[-half:]]
