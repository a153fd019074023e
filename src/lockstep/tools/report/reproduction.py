"""The files for checking and repeating a run: checkpoints, sources, fingerprints, replays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lockstep.formatting import format_bytes, format_duration, format_quantity
from lockstep.kernel.errors import FileError
from lockstep.messages import escape_control
from lockstep.model.fingerprint_file import FOLDER, list_fingerprints
from lockstep.record.columns import as_dict
from lockstep.record.reader import Run
from lockstep.redaction import redact
from lockstep.tools.report.summary import as_text, describe_layout, number_or

__all__ = [
    "CHECKPOINT_COLUMNS",
    "REPLAYS_FILE",
    "REPLAY_COLUMNS",
    "ReproductionSummary",
    "checkpoint_table",
    "summarize_reproduction",
]

CHECKPOINT_COLUMNS = ("steps", "after", "size", "digest of the weights")
REPLAY_COLUMNS = ("step", "time", "layout", "result")
REPLAYS_FILE = "replays.jsonl"
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
        sentences: Sentences about its sources, fingerprints and replays.
        replays: The replays as rows of text, in chronological order.
        remarks: Sentences about unreadable or incomplete files.
    """

    sentences: list[str]
    replays: list[list[str]]
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
    lines = _read_replays(run.folder)
    if lines:
        equal = sum(line.get("equal") is True for line in lines)
        result = "all with the same bits" if equal == len(lines) else f"{equal} with the same bits"
        sentences.append(f"{format_quantity(len(lines), 'replay')} of its steps, {result}.")
    return ReproductionSummary(
        sentences, shorten_table([_replay_row(line) for line in lines]), remarks
    )


def _read_replays(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of RUN/replays.jsonl; none if it is missing or cannot be read."""
    try:
        texts = (folder / REPLAYS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    replays = []
    for text in texts:
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        if isinstance(line, dict) and line.get("kind") == "replay":
            replays.append(line)
    return replays


def _replay_row(line: dict[str, Any]) -> list[str]:
    step = _format_step(line.get("step"))
    if line.get("microbatch") is not None:
        step += f", micro-batch {_format_step(line['microbatch'])}"
    differences = line.get("differences")
    said = [*map(str, differences)] if isinstance(differences, list) else []
    said += [as_text(line["failure"])] if line.get("failure") else []
    result = "the same bits" if line.get("equal") is True else "; ".join(said) or "other bits"
    row = [
        step,
        as_text(line.get("replayed")),
        describe_layout(as_dict(line.get("layout"))),
        result,
    ]
    return [escape_control(str(redact(cell))) for cell in row]


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
